{{/* A setting's text. Whole numbers stay whole: YAML numbers are floats here, and 67108864 would become 6.7108864e+07. */}}
{{- define "hedgerow.text" -}}
{{- $text := toString .value -}}
{{- if kindIs "float64" .value -}}{{- if eq (floor .value) .value -}}{{- $text = toString (int64 .value) -}}{{- end -}}{{- end -}}
{{- if kindIs "invalid" .value -}}{{- $text = "" -}}{{- end -}}
{{- $text -}}
{{- end }}

{{/* A service's HEDGEROW_* variables as YAML: what the chart knows, over them what the values say. root, service */}}
{{- define "hedgerow.settings" -}}
{{- $root := .root -}}
{{- $name := include "hedgerow.name" $root -}}
{{- $values := index $root.Values .service -}}
{{- $host := $root.Values.network.listenHost -}}
{{- $colocated := eq $root.Values.drafter.mode "colocated" -}}
{{- $settings := dict "LISTEN" (printf "%s:7411" $host) "ADMIN_LISTEN" (printf "%s:7412" $host) "METRICS_ADDRESS" (printf "%s:7413" $host) "GRACE" (toString $values.grace) -}}
{{- $_ := set $settings "LOG_FORMAT" "json" -}}
{{- with $root.Values.tracing.endpoint -}}
{{- $_ := set $settings "OTLP_ENDPOINT" . -}}
{{- $_ := set $settings "TRACE_RATIO" (toString $root.Values.tracing.ratio) -}}
{{- end -}}
{{- if $root.Values.tls.enabled -}}
{{- $_ := set $settings "TLS_CERT" "/etc/hedgerow/tls/tls.crt" -}}
{{- $_ := set $settings "TLS_KEY" "/etc/hedgerow/tls/tls.key" -}}
{{- $_ := set $settings "TLS_CA" "/etc/hedgerow/tls/ca.crt" -}}
{{- $_ := set $settings "TLS_CLIENT_CERTS" (toString (or (ne .service "gateway") $root.Values.tls.clientCerts)) -}}
{{- $_ := set $settings "TLS_ADMIN" "false" -}}
{{- end -}}
{{- if eq .service "gateway" -}}
{{- $_ := set $settings "VERIFIER" (include "hedgerow.verifierAddresses" $root) -}}
{{- $_ := set $settings "KVSTORE" (printf "%s-kvstore.%s.svc.%s:7411" $name $root.Release.Namespace $root.Values.network.clusterDomain) -}}
{{- $_ := set $settings "MODEL_PATH" $root.Values.model.path -}}
{{- $_ := set $settings "LIMITS_FILE" "/etc/hedgerow/limits/gateway" -}}
{{- if $root.Values.apiKeys.enabled -}}{{- $_ := set $settings "API_KEYS_FILE" "/etc/hedgerow/api-keys/api-keys" -}}{{- end -}}
{{- else if eq .service "verifier" -}}
{{- $_ := set $settings "MODEL_PATH" $root.Values.model.path -}}
{{- $_ := set $settings "MODEL_NAME" $root.Values.model.name -}}
{{- if gt (int $values.groupSize) 1 -}}
{{- $_ := set $settings "GROUP_HOSTS" (toString $values.groupSize) -}}
{{- $_ := set $settings "GROUP_LISTEN" (printf "%s:7414" $host) -}}
{{- end -}}
{{- with $root.Values.model.featureLayers -}}{{- $_ := set $settings "FEATURE_LAYERS" . -}}{{- end -}}
{{- if $colocated -}}
{{- $_ := set $settings "DRAFTER" "127.0.0.1:7421" -}}
{{- else if eq $root.Values.drafter.mode "deployment" -}}
{{- $_ := set $settings "DRAFTER" (printf "%s.%s.svc.%s:7411" (include "hedgerow.setName" (dict "root" $root "service" "drafter")) $root.Release.Namespace $root.Values.network.clusterDomain) -}}
{{- else if eq $root.Values.drafter.mode "in-process" -}}
{{- $_ := set $settings "DRAFTER" "in-process" -}}
{{- $_ := set $settings "DRAFTER_PATH" $root.Values.model.drafterPath -}}
{{- end -}}
{{- else if eq .service "drafter" -}}
{{- $_ := set $settings "MODEL_PATH" $root.Values.model.drafterPath -}}
{{- $_ := set $settings "TARGET_PATH" $root.Values.model.path -}}
{{- $_ := set $settings "MAX_VERIFIERS" (toString (max 4 (mul 2 (int $root.Values.verifier.groups)))) -}}
{{- if $colocated -}}
{{- $_ := set $settings "LISTEN" "127.0.0.1:7421" -}}
{{- $_ := set $settings "ADMIN_LISTEN" "127.0.0.1:7422" -}}
{{- $_ := set $settings "METRICS_ADDRESS" (printf "%s:7423" $host) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .service "gateway") $root.Values.tls.enabled $root.Values.tls.publicSecret -}}
{{- $_ := set $settings "TLS_CERT" "/etc/hedgerow/public/tls.crt" -}}
{{- $_ := set $settings "TLS_KEY" "/etc/hedgerow/public/tls.key" -}}
{{- $_ := set $settings "TLS_PEER_CERT" "/etc/hedgerow/tls/tls.crt" -}}
{{- $_ := set $settings "TLS_PEER_KEY" "/etc/hedgerow/tls/tls.key" -}}
{{- end -}}
{{- if eq .service "kvstore" -}}
{{- with $root.Values.redis.tls -}}
{{- if or .caSecret .caConfigMap -}}{{- $_ := set $settings "REDIS_TLS_CA" "/etc/hedgerow/redis-ca/ca.crt" -}}{{- end -}}
{{- if .certSecret -}}
{{- $_ := set $settings "REDIS_TLS_CERT" "/etc/hedgerow/redis-tls/tls.crt" -}}
{{- $_ := set $settings "REDIS_TLS_KEY" "/etc/hedgerow/redis-tls/tls.key" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .service "kvstore") $root.Values.redis.bundled $root.Values.tls.enabled -}}
{{- $_ := set $settings "REDIS_TLS_CERT" "/etc/hedgerow/tls/tls.crt" -}}
{{- $_ := set $settings "REDIS_TLS_KEY" "/etc/hedgerow/tls/tls.key" -}}
{{- $_ := set $settings "REDIS_TLS_CA" "/etc/hedgerow/tls/ca.crt" -}}
{{- end -}}
{{- range $field, $value := $values.config -}}
{{- $_ := set $settings (upper $field) (include "hedgerow.text" (dict "value" $value)) -}}
{{- end -}}
{{- range $field, $value := $settings }}
HEDGEROW_{{ $field }}: {{ $value | quote }}
{{- end }}
{{- end }}
