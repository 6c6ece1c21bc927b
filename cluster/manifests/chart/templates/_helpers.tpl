{{/* The RayService that was given, checked, as YAML. */}}
{{- define "samovar.given" -}}
{{- $tree := .Values.rayService -}}
{{- if not $tree -}}
{{- fail "rayService is empty: `samovar render --kuberay ... > rayservice.yaml`, then `--set-file rayService=rayservice.yaml`" -}}
{{- /* `helm lint` goes on here, and needs the shape. */ -}}
{{- $pod := dict "template" (dict "spec" (dict "containers" (list dict))) -}}
{{- $cluster := dict "headGroupSpec" $pod "workerGroupSpecs" (list $pod) -}}
{{- $tree = dict "metadata" (dict "name" "samovar") "spec" (dict "rayClusterConfig" $cluster) -}}
{{- else -}}
{{- if kindIs "string" $tree -}}{{- $tree = fromYaml $tree -}}{{- end -}}
{{- if ne (printf "%v %v" $tree.apiVersion $tree.kind) "ray.io/v1 RayService" -}}
{{- fail "rayService is no RayService of ray.io/v1: give the file that `samovar render --kuberay` prints" -}}
{{- end -}}
{{- end -}}
{{- toYaml $tree -}}
{{- end -}}

{{- define "samovar.name" -}}
{{- (include "samovar.given" . | fromYaml).metadata.name -}}
{{- end -}}

{{/* Of the pods of this RayService, whichever cluster is theirs. */}}
{{- define "samovar.selector" -}}
app.kubernetes.io/name: samovar
app.kubernetes.io/instance: {{ include "samovar.name" . }}
{{- end -}}

{{- define "samovar.labels" -}}
{{ include "samovar.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The number of the port named so in the head's pod. */}}
{{- define "samovar.port" -}}
{{- $head := (include "samovar.given" .root | fromYaml).spec.rayClusterConfig.headGroupSpec.template.spec -}}
{{- range (first $head.containers).ports -}}
{{- if eq .name $.name -}}{{- int .containerPort -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "samovar.service" -}}
{{- include "samovar.name" . }}-serve-svc
{{- end -}}
