{{- define "hibachi-router.name" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "hibachi-router.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hibachi-router.labels" -}}
{{ include "hibachi-router.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "hibachi-router.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "hibachi-router.name" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{- /* Is there anything for a Secret of ours? */}}
{{- define "hibachi-router.ownSecret" -}}
{{- if or .Values.upstreams .Values.settings .Values.files -}}
{{- if .Values.existingSecret -}}
{{- fail "existingSecret stands in place of upstreams, settings and files. Leave out one or the other." -}}
{{- end -}}
true
{{- end -}}
{{- end }}

{{- /* The Secret with the configuration; empty: there is none. */}}
{{- define "hibachi-router.secret" -}}
{{- if include "hibachi-router.ownSecret" . -}}
{{- include "hibachi-router.name" . -}}
{{- else -}}
{{- .Values.existingSecret -}}
{{- end -}}
{{- end }}

{{- /* A text, a number, a list or a truth value in JSON is one in TOML as well. toToml would write 8 as 8.0. */}}
{{- define "hibachi-router.toml" -}}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{- range .Values.upstreams }}

[[upstream]]
{{- range $name, $value := . }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The value of a variable: numbers without an exponent, lists with commas. */}}
{{- define "hibachi-router.variable" -}}
{{- if kindIs "string" . -}}
{{- . -}}
{{- else if kindIs "slice" . -}}
{{- join "," . -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end }}
