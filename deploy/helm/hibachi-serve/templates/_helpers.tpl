{{- /* The name of the router, or of a model. */}}
{{- define "hibachi-serve.name" -}}
{{- $name := .root.Release.Name -}}
{{- if ne .component "router" -}}
{{- $name = printf "%s-%s" $name .component -}}
{{- end -}}
{{- if gt (len $name) 40 -}}
{{- fail (printf "%s: expected a name of at most 40 letters, as controllers append to it. Shorten that of the release or of the model." $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{- define "hibachi-serve.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "hibachi-serve.metadata" -}}
name: {{ include "hibachi-serve.name" . }}{{ .suffix | default "" }}
labels:
  {{- include "hibachi-serve.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* The models with what they have of `defaults`, in JSON. */}}
{{- define "hibachi-serve.models" -}}
{{- $names := list }}
{{- $models := list }}
{{- range .Values.models }}
{{- $m := mergeOverwrite (deepCopy $.Values.defaults) (deepCopy .) }}
{{- if has $m.name (append $names "router") }}
{{- fail (printf "models: %s: another, or the router, is called so. Give each a name of its own." $m.name) }}
{{- end }}
{{- range $m.env }}
{{- if and (regexMatch "KEY|SECRET|TOKEN|PASSWORD" .name) .value }}
{{- fail (printf "models: %s: env: %s: everybody who may read the Deployment could read it. Name a Secret in valueFrom." $m.name .name) }}
{{- end }}
{{- end }}
{{- $names = append $names $m.name }}
{{- $ranks := mul $m.tensorParallelSize $m.pipelineParallelSize }}
{{- if mod $ranks $m.pods }}
{{- fail (printf "models: %s: pods: expected a divisor of tensorParallelSize times pipelineParallelSize, %d; got %v." $m.name $ranks $m.pods) }}
{{- end }}
{{- if and (gt (int $m.pods) 1) (gt (int $.Values.drainSeconds) 25) }}
{{- fail (printf "models: %s: with pods above 1, drainSeconds is at most 25, as torchrun kills what has not ended after 30 seconds; got %v." $m.name $.Values.drainSeconds) }}
{{- end }}
{{- if and $m.ray (or (gt (int $m.pods) 1) (not $m.image)) }}
{{- fail (printf "models: %s: with ray, expected an image that has hibachi[ray], and pods of 1." $m.name) }}
{{- end }}
{{- if and $m.ray $.Values.apiKey.secret }}
{{- fail (printf "models: %s: with ray, apiKey would not count, as hibachi.ray.app reads no variables. Name a file of keys that `volumes` brings in settings.api-keys." $m.name) }}
{{- end }}
{{- if not (hasKey $m.settings "served-model-name") }}
{{- $_ := set $m.settings "served-model-name" (list $m.name) }}
{{- end }}
{{- if hasKey $m.settings "kv-disk-bytes" }}
{{- $_ := set $m.settings "kv-disk" "/cache/prefixes" }}
{{- end }}
{{- $models = append $models $m }}
{{- end }}
{{- toJson $models }}
{{- end }}

{{- /* Settings as flags: a value in one argument, so that it may begin with a dash. Numbers without an exponent. */}}
{{- define "hibachi-serve.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ ternary "--" "--no-" $value }}{{ $name }}
{{- else if kindIs "slice" $value }}
- --{{ $name }}
{{- range $value }}
- {{ . | quote }}
{{- end }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $name $value | quote }}
{{- else }}
- --{{ $name }}={{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hibachi-serve.address" -}}
- --host=0.0.0.0
- --port=8000
- --drain-timeout={{ .Values.drainSeconds }}
{{- end }}

{{- define "hibachi-serve.key" -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.apiKey.secret }}
      key: {{ .root.Values.apiKey.key }}
{{- end }}

{{- /* What pods have in common. wait: seconds from the wish that a pod ends to SIGTERM. */}}
{{- define "hibachi-serve.pod" -}}
{{- $v := .root.Values }}
{{- $least := add $v.preStopSeconds $v.drainSeconds 5 }}
{{- $grace := int $v.terminationGracePeriodSeconds | default (add $least 5) }}
{{- if lt (int $grace) (int $least) }}
{{- fail (printf "terminationGracePeriodSeconds: expected 0, or at least preStopSeconds + drainSeconds + 5, which is %d, as running requests would be killed; got %d." $least $grace) }}
{{- end -}}
automountServiceAccountToken: false
# Else a Service named hibachi would set HIBACHI_PORT to an address.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ sub (add $grace .wait) $v.preStopSeconds }}
securityContext:
  {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- with $v.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "hibachi-serve.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- if .wait }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ .wait | quote }}]
{{- end }}
{{- end }}

{{- /* /health fails once the engine has failed or stalls, and /ready also while requests are drained. */}}
{{- define "hibachi-serve.probes" -}}
ports:
  - name: http
    containerPort: 8000
    protocol: TCP
startupProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div (add . 1) 2 }}
livenessProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /ready
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{- define "hibachi-serve.place" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* A pod of a model. role: server, worker (of a LeaderWorkerSet) or ray. */}}
{{- define "hibachi-serve.template" -}}
{{- $m := .model }}
{{- $ranks := mul $m.tensorParallelSize $m.pipelineParallelSize }}
{{- $wait := $.root.Values.preStopSeconds }}
{{- /* A rank asks rank 0 to end, to which a signal of its own would be the second one: the leader goes first. */}}
{{- if eq .role "worker" }}
{{- $wait = add $wait $.root.Values.drainSeconds 5 }}
{{- end }}
{{- $c := dict "root" .root "wait" $wait -}}
metadata:
  labels:
    {{- include "hibachi-serve.selector" . | nindent 4 }}
    app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  {{- with $m.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "hibachi-serve.pod" $c | nindent 2 }}
  containers:
    - name: {{ .role }}
      image: {{ $m.image | default (printf "hibachi-serve:%s" .root.Chart.AppVersion) | quote }}
      imagePullPolicy: {{ .root.Values.imagePullPolicy }}
      {{- if ne .role "ray" }}
      {{- if gt (int $m.pods) 1 }}
      command:
        - torchrun
        - --nnodes={{ $m.pods }}
        - --nproc-per-node={{ div $ranks $m.pods }}
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port=29500
        - -m
        - hibachi
        - serve
      {{- else }}
      command: [hibachi, serve]
      {{- end }}
      args:
        - {{ printf "--model=%s" $m.model | quote }}
        {{- include "hibachi-serve.address" .root | nindent 8 }}
        {{- if gt (int $ranks) 1 }}
        - --tensor-parallel-size={{ $m.tensorParallelSize }}
        - --pipeline-parallel-size={{ $m.pipelineParallelSize }}
        {{- end }}
        {{- include "hibachi-serve.flags" $m.settings | trim | nindent 8 }}
      {{- end }}
      env:
        # Everything that a library keeps for later: nothing else can be written to but /tmp.
        - name: HOME
          value: /cache
        - name: XDG_CACHE_HOME
          value: /cache
        {{- if .root.Values.apiKey.secret }}
        {{- include "hibachi-serve.key" (dict "root" .root "variable" "HIBACHI_API_KEY") | nindent 8 }}
        {{- end }}
        {{- with $m.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if eq .role "server" }}
      {{- include "hibachi-serve.probes" $m.startSeconds | nindent 6 }}
      {{- end }}
      {{- include "hibachi-serve.container" $c | nindent 6 }}
      resources:
        {{- toYaml $m.resources | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: cache
          mountPath: /cache
        {{- if or $m.ray (gt (int $ranks) 1) }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- with $m.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: cache
      {{- if $m.cache.claim }}
      persistentVolumeClaim:
        claimName: {{ $m.cache.claim }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ $m.cache.sizeLimit }}
      {{- end }}
    {{- if or $m.ray (gt (int $ranks) 1) }}
    # Ranks of one pod talk through it, and a container has 64 MiB of it by itself.
    - name: shm
      emptyDir:
        medium: Memory
    {{- end }}
    {{- with $m.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "hibachi-serve.place" $m | nindent 2 }}
{{- end }}
