{{/* Names, labels, images. Every definition takes the root, or a dict with `root` and what else it says. */}}

{{- define "hedgerow.name" -}}
{{- $name := ternary .Release.Name (printf "%s-hedgerow" .Release.Name) (contains "hedgerow" .Release.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "hedgerow.selector" -}}
app.kubernetes.io/name: hedgerow
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- if hasKey . "set" }}
hedgerow/set: {{ .set | quote }}
{{- end }}
{{- end }}

{{- define "hedgerow.labels" -}}
{{ include "hedgerow.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "hedgerow.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "hedgerow.labels" . | nindent 2 }}
{{- end }}

{{/* root, image: "slim" or "engine" */}}
{{- define "hedgerow.image" -}}
{{- $image := index .root.Values.images .image -}}
{{- with .root.Values.images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- with $image.digest }}@{{ . }}{{ end -}}
{{- end }}

{{- define "hedgerow.secretName" -}}
{{- default (printf "%s-secrets" (include "hedgerow.name" .)) .Values.secrets.existingSecret -}}
{{- end }}

{{- define "hedgerow.apiKeysSecret" -}}
{{- default (printf "%s-api-keys" (include "hedgerow.name" .)) .Values.apiKeys.existingSecret -}}
{{- end }}

{{- define "hedgerow.serviceAccount" -}}
{{- $made := ternary (include "hedgerow.name" .) "default" .Values.serviceAccount.create -}}
{{- default $made .Values.serviceAccount.name -}}
{{- end }}

{{- define "hedgerow.tlsSecret" -}}
{{- default (printf "%s-tls" (include "hedgerow.name" .)) .Values.tls.existingSecret -}}
{{- end }}

{{/* What the command line needs of files, as NOTES.txt has them made. */}}
{{- define "hedgerow.clientFiles" -}}
{{- if .Values.tls.enabled }}{{ if and .Values.tls.publicSecret (not .Values.tls.publicCa) }} --tls{{ else }} --tls-ca ca.crt{{ end }}{{ if .Values.tls.clientCerts }} --tls-cert tls.crt --tls-key tls.key{{ end }}{{ end -}}
{{- end }}

{{/* What a port speaks, for meshes and balancers. */}}
{{- define "hedgerow.appProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" .Values.tls.enabled -}}
{{- end }}

{{/* The names that the certificate is for, as YAML: of sets to come, too, since a certificate outlives upgrades. The
     co-located drafter is called at 127.0.0.1. */}}
{{- define "hedgerow.dnsNames" -}}
{{- $name := include "hedgerow.name" . -}}
- localhost
{{- range $service := list "gateway" "gateway-peers" "verifier" "drafter" "drafter-a" "drafter-b" "kvstore" "redis" }}
{{- $short := printf "%s-%s" $name $service }}
- {{ $short }}
- {{ $short }}.{{ $.Release.Namespace }}
- {{ $short }}.{{ $.Release.Namespace }}.svc
- {{ $short }}.{{ $.Release.Namespace }}.svc.{{ $.Values.network.clusterDomain }}
{{- end }}
{{- range $set := list "" "-a" "-b" }}
- "*.{{ $name }}-verifier{{ $set }}.{{ $.Release.Namespace }}.svc.{{ $.Values.network.clusterDomain }}"
- "*.{{ $name }}-groups{{ $set }}.{{ $.Release.Namespace }}.svc.{{ $.Values.network.clusterDomain }}"
{{- end }}
{{- range .Values.tls.dnsNames }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Every group's first pod: a StatefulSet and a LeaderWorkerSet number them alike. New sessions go to the first of them,
     and to those of its fingerprint. */}}
{{- define "hedgerow.verifierAddresses" -}}
{{- $addresses := list -}}
{{- range $values := include "hedgerow.sets" . | fromJsonArray -}}
{{- $root := dict "Values" $values "Release" $.Release "Chart" $.Chart -}}
{{- $name := include "hedgerow.groupsName" $root -}}
{{- $service := ternary $name (printf "%s-verifier" (include "hedgerow.name" $root)) (eq $values.verifier.kind "LeaderWorkerSet") -}}
{{- range $group := until (int $values.verifier.groups) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s.%s.svc.%s:7411" $name $group $service $.Release.Namespace $.Values.network.clusterDomain) -}}
{{- end -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}
