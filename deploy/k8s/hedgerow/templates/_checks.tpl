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
{{- include "hedgerow.checkVariables" . -}}
{{- range $set := include "hedgerow.sets" . | fromJsonArray -}}
{{- $size := int $set.verifier.groupSize -}}
{{- $ranks := int (default 1 $set.verifier.config.tensor_parallel) -}}
{{- if and (gt $size 1) (ne $set.verifier.kind "LeaderWorkerSet") -}}
{{- fail (printf "verifier.groupSize: %d pods of a group need verifier.kind LeaderWorkerSet and its controller; a StatefulSet's group is one pod" $size) -}}
{{- else if and (gt $size 1) (or (lt $ranks $size) (ne (mod $ranks $size) 0)) -}}
{{- fail (printf "verifier.groupSize: verifier.config.tensor_parallel, %d, must be a multiple of %d: each pod of a group has as many ranks" $ranks $size) -}}
{{- else if and (gt $size 1) (eq (default "cpu" $set.verifier.config.device) "cuda") -}}
{{- fail "verifier.groupSize: ranks on GPUs are of one pod: it must be 1 where verifier.config.device is cuda" -}}
{{- end -}}
{{- end -}}
{{- include "hedgerow.checkGpus" . -}}
{{- include "hedgerow.checkIdle" . -}}
{{- with .Values.redis.tls -}}
{{- if and $.Values.redis.bundled (or .caSecret .caConfigMap .certSecret) -}}
{{- fail "redis.tls: it is of your own Redis; the bundled store has the certificates of tls (redis.bundled is true)" -}}
{{- else if and .caSecret .caConfigMap -}}
{{- fail (printf "redis.tls: caSecret %q and caConfigMap %q both name an authority; one is enough" .caSecret .caConfigMap) -}}
{{- end -}}
{{- end -}}
{{- with .Values.tls -}}
{{- if and .publicSecret (not .enabled) -}}
{{- fail (printf "tls.publicSecret: %q is for nothing while tls.enabled is false" .publicSecret) -}}
{{- else if and .publicCa (not .publicSecret) -}}
{{- fail "tls.publicCa: tls.publicSecret must name the Secret that has it" -}}
{{- else if and .publicSecret (not $.Values.test.address) -}}
{{- fail "tls.publicSecret: test.address must be HOST:PORT with a name of that certificate, by which helm test and the notes reach the gateways" -}}
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
