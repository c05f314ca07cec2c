{{/* What a schema cannot say: values that contradict each other. Renders nothing. */}}
{{- define "hedgerow.checks" -}}
{{- $name := include "hedgerow.name" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride, or the release's name: %q is no name for a Service: small letters, digits and hyphens, a letter first" $name) -}}
{{- end -}}
{{- $tags := dict "images.slim.tag" .Values.images.slim.tag -}}
{{- range $set := include "hedgerow.sets" . | fromJsonArray -}}
{{- $_ := set $tags (ternary "images.engine.tag of an entry of previous" "images.engine.tag" $set.leaving) $set.images.engine.tag -}}
{{- end -}}
{{- range $where, $tag := $tags -}}
{{- if eq (lower $tag) "latest" -}}
{{- fail (printf "%s: %q is another image tomorrow; it must be a version" $where $tag) -}}
{{- end -}}
{{- end -}}
{{- $scaled := .Values.gateway.autoscaling -}}
{{- if gt (int $scaled.minReplicas) (int $scaled.maxReplicas) -}}
{{- fail (printf "gateway.autoscaling.minReplicas: %v is more than maxReplicas, %v" $scaled.minReplicas $scaled.maxReplicas) -}}
{{- end -}}
{{- $pods := dict "gateway" (ternary $scaled.minReplicas .Values.gateway.replicas $scaled.enabled) "kvstore" .Values.kvstore.replicas -}}
{{- range $service, $least := $pods -}}
{{- $budget := (index $.Values $service).pdb -}}
{{- if and $budget.enabled (gt (int $least) 1) (ge (int $budget.maxUnavailable) (int $least)) -}}
{{- fail (printf "%s.pdb.maxUnavailable: %v of %v pods would leave none" $service $budget.maxUnavailable $least) -}}
{{- end -}}
{{- end -}}
{{- end }}
