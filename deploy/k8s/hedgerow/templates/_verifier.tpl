{{/* The pod of a verifier group's leader, the same in a StatefulSet and in a LeaderWorkerSet. A co-located drafter is a
     second process of its container: the device plugin gives a GPU to one container only. */}}
{{- define "hedgerow.verifierTemplate" -}}
{{- $root := .root -}}
{{- $colocated := eq $root.Values.drafter.mode "colocated" -}}
metadata:
  {{- include "hedgerow.podMetadata" . | nindent 2 }}
    {{- if $colocated }}
    checksum/drafter: {{ include "hedgerow.settings" (dict "root" $root "service" "drafter") | sha256sum }}
    {{- end }}
spec:
  {{- include "hedgerow.pod" . | nindent 2 }}
  containers:
    - name: verifier
      args: {{ ternary "[deploy.docker.together, /etc/hedgerow/settings]" "[services.verifier]" $colocated }}
      {{- include "hedgerow.container" . | nindent 6 }}
      {{- if not $colocated }}
      envFrom:
        - configMapRef: {name: {{ .name }}}
      {{- end }}
      {{- with include "hedgerow.env" . | trim }}
      env:
        {{- . | nindent 8 }}
      {{- end }}
      {{- include "hedgerow.probes" (dict "startup" "" "startupSeconds" $root.Values.verifier.startupSeconds) | nindent 6 }}
      resources:
        {{- include "hedgerow.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "hedgerow.volumeMounts" . | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        {{- if $colocated }}
        - {name: verifier-settings, mountPath: /etc/hedgerow/settings/verifier, readOnly: true}
        - {name: drafter-settings, mountPath: /etc/hedgerow/settings/drafter, readOnly: true}
        {{- end }}
  volumes:
    {{- include "hedgerow.volumes" . | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.verifier.shm }}}
    {{- if $colocated }}
    - name: verifier-settings
      configMap: {name: {{ .name }}}
    - name: drafter-settings
      configMap: {name: {{ include "hedgerow.setName" (dict "root" $root "service" "drafter") }}}
    {{- end }}
{{- end }}
