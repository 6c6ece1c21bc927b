variable "region" {
  description = "AWS region of the state bucket. Example: \"us-east-1\"."
  type        = string
}

variable "bucket_name" {
  description = "Name of the bucket; null = samovar-state-<account id>."
  type        = string
  default     = null
}

variable "old_states_days" {
  description = "Days that earlier versions of a state are kept."
  type        = number
  default     = 90

  validation {
    condition     = var.old_states_days >= 7
    error_message = "old_states_days must be 7 or more: an earlier state is the way back from a broken one."
  }
}
