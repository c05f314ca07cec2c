{{/* Values that would do nothing where somebody counts on them: keys, certificates, a Redis, weights. */}}
{{- define "hedgerow.checkIdle" -}}
{{- with .Values.apiKeys -}}
{{- if and (or .keys .existingSecret) (not .enabled) -}}
{{- fail (printf "apiKeys.%s: given, and apiKeys.enabled is false: the gateways would let everybody in" (ternary "keys" "existingSecret" (ne .keys ""))) -}}
{{- else if and .keys .existingSecret -}}
{{- fail (printf "apiKeys.keys: they would not count beside apiKeys.existingSecret %q" .existingSecret) -}}
{{- end -}}
{{- end -}}
{{- with .Values.tls -}}
{{- if not .enabled -}}
{{- $given := dict "clientCerts" .clientCerts "existingSecret" .existingSecret "certManager.enabled" .certManager.enabled -}}
{{- range $name, $value := $given -}}
{{- if $value -}}{{- fail (printf "tls.%s: it is for nothing while tls.enabled is false" $name) -}}{{- end -}}
{{- end -}}
{{- else if and .existingSecret .certManager.enabled -}}
{{- fail (printf "tls.existingSecret: %q and tls.certManager.enabled both say whose the certificate is; one is enough" .existingSecret) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.secrets.redisUrl .Values.redis.bundled -}}
{{- fail "secrets.redisUrl: it names your own Redis, and redis.bundled is true: sessions would go to the bundled store" -}}
{{- end -}}
{{- with .Values.weights -}}
{{- if eq .source "bundled" -}}
{{- range $name, $value := dict "hostPath" .hostPath "claimName" .claimName "convert.enabled" .convert.enabled -}}
{{- if $value -}}{{- fail (printf "weights.%s: weights.source is bundled, the images' own models; it must be pvc or hostPath" $name) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
