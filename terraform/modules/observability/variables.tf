variable "cluster_name" {
  description = "Name of the cluster, and so of its log group and alarms. Example: \"samovar-dev\"."
  type        = string
}

variable "kms_key_arn" {
  description = "Key of the log group and the topic."
  type        = string
}

variable "log_days" {
  description = "Days that logs are kept."
  type        = number
}

variable "kv_bucket_name" {
  description = "Bucket of KV blocks."
  type        = string
}

variable "edge_metrics" {
  description = "Names of the load balancer and its target group in CloudWatch."
  type        = object({ load_balancer = string, target_group = string })
}

variable "alarm_emails" {
  description = "Recipients of alarms and budget mails; empty = alarms show in CloudWatch only."
  type        = set(string)

  validation {
    condition     = alltrue([for email in var.alarm_emails : can(regex("^[^@ ]+@[^@ ]+$", email))])
    error_message = "alarm_emails must be addresses such as ops@example.com."
  }
}

variable "errors_5min_max" {
  description = "More 5xx answers than this in five minutes are an alarm."
  type        = number
}

variable "first_word_s_max" {
  description = "An alarm when the slowest tenth waits longer than this for its first bytes."
  type        = number
}

variable "kv_bytes_max" {
  description = "More bytes of KV blocks than this are an alarm."
  type        = number
}

variable "monthly_usd_max" {
  description = "Budget of a month in US dollars; null = no budget. Mails at 80 % spent and when 100 % are forecast."
  type        = number

  validation {
    condition     = var.monthly_usd_max == null ? true : var.monthly_usd_max > 0
    error_message = "monthly_usd_max must be more than 0, or null for no budget."
  }
}
