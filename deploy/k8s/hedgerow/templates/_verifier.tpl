{{/* The pod of a verifier group's leader, the same in a StatefulSet and in a LeaderWorkerSet; with `worker`, of another
     host of the group, which runs its ranks for the leader. A co-located drafter is a second process of the leader's
     container: the device plugin gives a GPU to one container only. */}}
{{- define "hedgerow.verifierTemplate" -}}
{{- $root := .root -}}
{{- $colocated := and (eq $root.Values.drafter.mode "colocated") (not .worker) -}}
{{- $beside := include "hedgerow.beside" $root.Values.verifier -}}
{{- $port := ternary 7415 7412 (ne $beside "") -}}
{{- $several := gt (int $root.Values.verifier.groupSize) 1 -}}
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
      {{- $env := include "hedgerow.env" . | trim }}
      {{- if and $several (not $colocated) }}{{ $env = printf "%s\n%s" (include "hedgerow.groupEnv" . | trim) $env | trim }}{{ end }}
      {{- if $colocated }}{{ $env = printf "%s\n%s" $env (include "hedgerow.drafterEnv" $root | trim) | trim }}{{ end }}
      {{- if $beside }}{{ $env = printf "%s\n%s" (include "hedgerow.besideEnv" $root | trim) $env | trim }}{{ end }}
      {{- with $env }}
      env:
        {{- . | nindent 8 }}
      {{- end }}
      {{- if .worker }}
      # It is started as soon as it answers: it may wait for the leader's pod for as long as that takes.
      {{- include "hedgerow.probes" (dict "startup" "live" "startupSeconds" 240 "port" $port) | nindent 6 }}
      {{- else }}
      {{- include "hedgerow.probes" (dict "startup" "" "startupSeconds" $root.Values.verifier.startupSeconds "port" $port) | nindent 6 }}
      {{- end }}
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
      {{- if $several }}
      projected:
        defaultMode: 0440
        sources:
          - configMap: {name: {{ .name }}}
          - secret:
              name: {{ include "hedgerow.secretName" $root }}
              items: [{key: group-secret, path: HEDGEROW_GROUP_SECRET}]
      {{- else }}
      configMap: {name: {{ .name }}}
      {{- end }}
    - name: drafter-settings
      configMap: {name: {{ include "hedgerow.setName" (dict "root" $root "service" "drafter") }}}
    {{- end }}
{{- end }}

{{/* What the pods of a group of several know of it beside the ConfigMap. The number of a worker is its label, which every
     version of the controller sets; the leader's address is completed to a name that the certificate is for. */}}
{{- define "hedgerow.groupEnv" -}}
- name: HEDGEROW_GROUP_SECRET
  valueFrom:
    secretKeyRef: {name: {{ include "hedgerow.secretName" .root }}, key: group-secret}
{{- if .worker }}
- name: HEDGEROW_GROUP_HOST
  valueFrom:
    fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}
- name: HEDGEROW_GROUP_LEADER
  value: $(LWS_LEADER_ADDRESS).svc.{{ .root.Values.network.clusterDomain }}:7414
{{- end }}
{{- end }}

{{/* Of the pod, not in the ConfigMap: it comes and goes with the probes that ask there, also where a container starts again
     after an upgrade that left its pod as it was. */}}
{{- define "hedgerow.besideEnv" -}}
- name: {{ ternary "VERIFIER__" "" (eq .Values.drafter.mode "colocated") }}HEDGEROW_HEALTH_LISTEN
  value: {{ printf "%s:7415" .Values.network.listenHost | quote }}
{{- end }}

{{/* A co-located drafter's own variables: its process gets them without the prefix (deploy/docker/together.py). */}}
{{- define "hedgerow.drafterEnv" -}}
{{- range $name, $value := .Values.drafter.env }}
- name: DRAFTER__{{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- range .Values.drafter.extraEnv }}
{{ list (merge (dict "name" (printf "DRAFTER__%s" .name)) .) | toYaml }}
{{- end }}
{{- end }}
