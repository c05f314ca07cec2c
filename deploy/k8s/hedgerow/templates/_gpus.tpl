{{/* Of every set: who computes on GPUs has some, and who has some computes there; each rank of a pod takes one. */}}
{{- define "hedgerow.checkGpus" -}}
{{- range $set := include "hedgerow.sets" . | fromJsonArray -}}
{{- $of := ternary " of an entry of previous" "" $set.leaving -}}
{{- $verifier := $set.verifier -}}
{{- $device := default "cpu" $verifier.config.device -}}
{{- $gpus := int $verifier.gpus -}}
{{- $each := div (int (default 1 $verifier.config.tensor_parallel)) (int $verifier.groupSize) -}}
{{- if and (eq $device "cuda") (lt $gpus 1) -}}
{{- fail (printf "verifier.gpus%s: 0 where verifier.config.device is cuda; each of its ranks takes one" $of) -}}
{{- else if and (ne $device "cuda") (gt $gpus 0) -}}
{{- fail (printf "verifier.gpus%s: %d would be held and not used; verifier.config.device must be cuda" $of $gpus) -}}
{{- else if and (eq $device "cuda") (gt (int $each) $gpus) -}}
{{- fail (printf "verifier.gpus%s: %d for the %d ranks of a pod (verifier.config.tensor_parallel); each takes one" $of $gpus $each) -}}
{{- end -}}
{{- $drafter := $set.drafter -}}
{{- $device = default "cpu" $drafter.config.device -}}
{{- $own := eq $drafter.mode "deployment" -}}
{{- $gpus = int $drafter.gpus -}}
{{- if and (not $own) (gt $gpus 0) -}}
{{- fail (printf "drafter.gpus%s: %d is for drafter.mode deployment; a co-located drafter has the verifier's" $of $gpus) -}}
{{- else if and $own (eq $device "cuda") (lt $gpus 1) -}}
{{- fail (printf "drafter.gpus%s: 0 where drafter.config.device is cuda" $of) -}}
{{- else if and $own (ne $device "cuda") (gt $gpus 0) -}}
{{- fail (printf "drafter.gpus%s: %d would be held and not used; drafter.config.device must be cuda" $of $gpus) -}}
{{- else if and (eq $drafter.mode "colocated") (eq $device "cuda") (lt (int $verifier.gpus) 1) -}}
{{- fail (printf "drafter.config.device%s: cuda, and verifier.gpus is 0: a co-located drafter has the verifier's" $of) -}}
{{- end -}}
{{- end -}}
{{- end }}
