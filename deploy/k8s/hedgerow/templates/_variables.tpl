{{/* No variable of env or extraEnv is a setting of a service, turns nothing on, or shows a secret. */}}
{{- define "hedgerow.checkVariables" -}}
{{- range $service := list "gateway" "kvstore" -}}
{{- include "hedgerow.checkVariablesOf" (dict "name" $service "values" (index $.Values $service)) -}}
{{- end -}}
{{- range $set := include "hedgerow.sets" . | fromJsonArray -}}
{{- range $service := list "verifier" "drafter" -}}
{{- $name := ternary (printf "of an entry of previous, %s" $service) $service $set.leaving -}}
{{- include "hedgerow.checkVariablesOf" (dict "name" $name "values" (index $set $service)) -}}
{{- end -}}
{{- end -}}
{{- include "hedgerow.checkVariablesOf" (dict "name" "redis" "values" .Values.redis) -}}
{{- include "hedgerow.checkVariablesOf" (dict "name" "weights.convert" "values" .Values.weights.convert) -}}
{{- end }}

{{/* name: where in the values; values */}}
{{- define "hedgerow.checkVariablesOf" -}}
{{- $given := list -}}
{{- range $name, $_ := .values.env -}}
{{- $given = append $given (dict "name" $name "where" "env" "plain" true) -}}
{{- end -}}
{{- range .values.extraEnv -}}
{{- $given = append $given (dict "name" .name "where" "extraEnv" "plain" .value) -}}
{{- end -}}
{{- $of := .name -}}
{{- $configured := hasKey .values "config" -}}
{{- range $given -}}
{{- if hasPrefix "HEDGEROW_" .name -}}
{{- $instead := ternary (printf "%s.config has those by their names in lower case" $of) "it is not for here" $configured -}}
{{- fail (printf "%s.%s: %s is a setting of the services; %s" $of .where .name $instead) -}}
{{- else if has .name (list "OTEL_EXPORTER_OTLP_ENDPOINT" "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") -}}
{{- fail (printf "%s.%s: %s turns nothing on; tracing.endpoint says where spans go" $of .where .name) -}}
{{- else if and .plain (regexMatch "^OTEL_EXPORTER_OTLP_(TRACES_)?HEADERS$" .name) -}}
{{- fail (printf "%s.%s: %s holds secrets; tracing.existingSecret names a Secret with it" $of .where .name) -}}
{{- end -}}
{{- end -}}
{{- end }}
