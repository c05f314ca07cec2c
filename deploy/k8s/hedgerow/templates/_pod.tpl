{{/* What the pods of every service share. */}}

{{/* Labels that no release of the chart changes by itself: a verifier that only got another label would load for minutes. */}}
{{- define "hedgerow.podLabels" -}}
{{ include "hedgerow.selector" . }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "hedgerow.podMetadata" -}}
labels:
  {{- include "hedgerow.podLabels" . | nindent 2 }}
annotations:
  checksum/settings: {{ include "hedgerow.settings" (dict "root" .root "service" .component) | sha256sum }}
  {{- if eq .component "gateway" "kvstore" }}
  # of those that it is given
  checksum/secrets: {{ include "hedgerow.secretsChecksum" . }}
  {{- end }}
  {{- $annotations := (index .root.Values .component).podAnnotations }}
  {{- if include "hedgerow.withDrafter" . }}{{ $annotations = merge dict $annotations .root.Values.drafter.podAnnotations }}{{ end }}
  {{- with $annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* It changes with the secrets that a service is given. Annotations are read by more people than Secrets are, and a
     password of one's own Redis may be weak: scrypt (derivePassword), salted with the release, so that each guess costs. */}}
{{- define "hedgerow.secretsChecksum" -}}
{{- $secrets := .root.Values.secrets -}}
{{- $given := list $secrets.existingSecret $secrets.tenantSecret -}}
{{- if eq .component "kvstore" -}}{{- $given = list $secrets.existingSecret $secrets.redisUrl $secrets.redisPassword -}}{{- end -}}
{{- $salt := printf "%s/%s" .root.Release.Namespace .root.Release.Name -}}
{{- derivePassword 1 "maximum" ($given | toJson) $salt .component | sha256sum -}}
{{- end }}

{{/* The account, security, placing and ending of a pod. */}}
{{- define "hedgerow.pod" -}}
{{- $values := index .root.Values .component -}}
serviceAccountName: {{ include "hedgerow.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "hedgerow.podSecurity" . | nindent 2 }}
# preStop, the drain, and 15 s for calls that ignore their end
terminationGracePeriodSeconds: {{ add $values.preStopSeconds $values.grace 15 }}
{{- include "hedgerow.placing" . }}
{{- end }}

{{- define "hedgerow.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "hedgerow.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "hedgerow.placing" -}}
{{- $values := index .root.Values .component -}}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if ne (default "none" $values.spread) "none" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ $values.spread }}
    nodeTaintsPolicy: Honor # nodes that the pod cannot go to are no place to be missed at
    labelSelector:
      matchLabels:
        {{- include "hedgerow.selector" (omit . "set") | nindent 8 }}
{{- end }}
{{- end }}

{{/* Image, security, ports, environment and ending of a service's container. */}}
{{- define "hedgerow.container" -}}
{{- $values := index .root.Values .component -}}
image: {{ include "hedgerow.image" . | quote }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
securityContext:
  {{- include "hedgerow.containerSecurity" . | nindent 2 }}
ports:
  - {name: grpc, containerPort: 7411}
  - {name: admin, containerPort: 7412}
  - {name: metrics, containerPort: 7413}
  {{- if include "hedgerow.withDrafter" . }}
  - {name: drafter-metrics, containerPort: 7423}
  {{- end }}
  {{- if and (eq .component "verifier") (include "hedgerow.beside" $values) }}
  - {name: health, containerPort: 7415}
  {{- end }}
  {{- if and (eq .component "verifier") (not .worker) (gt (int (default 1 $values.groupSize)) 1) }}
  - {name: group, containerPort: 7414}
  {{- end }}
{{- if gt (int $values.preStopSeconds) 0 }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ $values.preStopSeconds }}
{{- end }}
{{- end }}

{{- define "hedgerow.env" -}}
{{- $values := index .root.Values .component -}}
{{- range $name, $value := $values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .root.Values.tracing.existingSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: headers}
{{- end }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Not empty where a verifier computes on a GPU and its probes are answered by a process that has none. */}}
{{- define "hedgerow.beside" -}}
{{- if and .healthProcess (eq (default "cpu" .config.device) "cuda") }}yes{{ end -}}
{{- end }}

{{/* Liveness asks whether the process answers at all: one that loads, waits for a peer or drains does, and a busy one has
     a minute. What a start must reach: "" is to serve, "live" is to run. startupSeconds, startup, port */}}
{{- define "hedgerow.probes" -}}
{{- $port := default 7412 .port -}}
startupProbe:
  grpc: {port: {{ $port }}, service: {{ .startup | quote }}}
  periodSeconds: 2
  timeoutSeconds: 10
  failureThreshold: {{ div (add .startupSeconds 1) 2 }}
livenessProbe:
  grpc: {port: {{ $port }}, service: live}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ $port }}, service: ""}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{- define "hedgerow.resources" -}}
{{- $values := index .root.Values .component -}}
{{- $resources := deepCopy $values.resources -}}
{{- if gt (int (default 0 $values.gpus)) 0 -}}
{{- $gpus := dict "nvidia.com/gpu" (int $values.gpus) -}}
{{- $_ := set $resources "limits" (merge $gpus (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{- define "hedgerow.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if and (ne .root.Values.weights.source "bundled") (ne .component "kvstore") }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/hedgerow/tls, readOnly: true}
{{- end }}
{{- $mounts := (index .root.Values .component).extraVolumeMounts }}
{{- if include "hedgerow.withDrafter" . }}{{ $mounts = concat $mounts .root.Values.drafter.extraVolumeMounts | uniq }}{{ end }}
{{- with $mounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "hedgerow.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ ternary "4Gi" "64Mi" (gt (int (default 0 (index .root.Values .component).gpus)) 0) }}}
{{- if eq .component "kvstore" }}
{{- else if eq .root.Values.weights.source "pvc" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ required "weights.claimName: the claim that holds the weights" .root.Values.weights.claimName }}
    readOnly: true
{{- else if eq .root.Values.weights.source "hostPath" }}
- name: models
  hostPath:
    path: {{ required "weights.hostPath: the nodes' folder that holds the weights" .root.Values.weights.hostPath }}
    type: Directory
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "hedgerow.tlsSecret" .root }}
    defaultMode: 0440
{{- end }}
{{- $more := (index .root.Values .component).extraVolumes }}
{{- if include "hedgerow.withDrafter" . }}{{ $more = concat $more .root.Values.drafter.extraVolumes | uniq }}{{ end }}
{{- with $more }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Not empty where a verifier's container has a drafter in it, whose annotations and volumes are the pod's then. */}}
{{- define "hedgerow.withDrafter" -}}
{{- if and (eq .component "verifier") (not .worker) (eq .root.Values.drafter.mode "colocated") }}yes{{ end -}}
{{- end }}

{{/* The port of the bundled store, and that somebody listens there. */}}
{{- define "hedgerow.redisPort" -}}
ports:
  - {name: redis, containerPort: 6379}
livenessProbe:
  tcpSocket: {port: redis}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  tcpSocket: {port: redis}
  periodSeconds: 2
  timeoutSeconds: 5
{{- end }}
