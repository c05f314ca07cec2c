{{/* A set: verifier groups of one fingerprint, and their drafter. The values' own, and those that an upgrade left. */}}

{{/* The values of every set as a JSON list, the newest first. What an entry of `previous` says goes before the rest, key
     by key of `model`, `verifier`, `drafter` and `images`. Its image may be one that refuses HEDGEROW_HEALTH_LISTEN. */}}
{{- define "hedgerow.sets" -}}
{{- $sets := list (merge (dict "leaving" false) .Values) -}}
{{- $names := list .Values.verifier.set -}}
{{- range $entry := .Values.previous -}}
{{- $values := deepCopy (omit $.Values "previous") -}}
{{- $_ := set $values.verifier "healthProcess" false -}}
{{- range $part := list "images" "model" "verifier" "drafter" -}}
{{- range $key, $value := index $entry $part -}}
{{- $_ := set (index $values $part) $key $value -}}
{{- end -}}
{{- end -}}
{{- $images := $values.images.engine -}}
{{- range $key, $value := $.Values.images.engine -}}
{{- if not (hasKey $images $key) -}}{{- $_ := set $images $key $value -}}{{- end -}}
{{- end -}}
{{- $name := $values.verifier.set -}}
{{- if has $name $names -}}
{{- fail (printf "previous: verifier.set %q is taken: each set has a name of its own" $name) -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- $sets = append $sets (set $values "leaving" true) -}}
{{- end -}}
{{- toJson $sets -}}
{{- end }}

{{/* The name of what runs a set's groups, which begins their pods' names. A LeaderWorkerSet has another one than a
     StatefulSet: its controller makes a Service of its name, which would be in the way of the chart's own, and stay there
     when the kind changes. */}}
{{- define "hedgerow.groupsName" -}}
{{- $service := ternary "groups" "verifier" (eq .Values.verifier.kind "LeaderWorkerSet") -}}
{{- include "hedgerow.setName" (dict "root" . "service" $service) -}}
{{- end }}

{{/* The name of a set's verifier or drafter. root, service */}}
{{- define "hedgerow.setName" -}}
{{- $name := printf "%s-%s" (include "hedgerow.name" .root) .service -}}
{{- with .root.Values.verifier.set }}{{ $name = printf "%s-%s" $name . }}{{ end -}}
{{- $name -}}
{{- end }}

{{/* In which a verifier of any set must have loaded. */}}
{{- define "hedgerow.startupSeconds" -}}
{{- $most := 0 -}}
{{- range $values := include "hedgerow.sets" . | fromJsonArray -}}
{{- $most = max $most (int $values.verifier.startupSeconds) -}}
{{- end -}}
{{- $most -}}
{{- end }}

{{/* Not empty where a set has its drafter in the verifier's container. */}}
{{- define "hedgerow.anyColocated" -}}
{{- range include "hedgerow.sets" . | fromJsonArray }}{{ if eq .drafter.mode "colocated" }}yes{{ end }}{{ end -}}
{{- end }}

{{/* Not empty where a set has groups of several pods. */}}
{{- define "hedgerow.several" -}}
{{- range include "hedgerow.sets" . | fromJsonArray }}{{ if gt (int .verifier.groupSize) 1 }}yes{{ end }}{{ end -}}
{{- end }}
