variable "cluster_name" {
  description = "Name of the cluster, in names and tags. Example: \"samovar-dev\"."
  type        = string
}

variable "account" {
  description = "Where everything is: AWS account id, partition (\"aws\") and region."
  type        = object({ id = string, partition = string, region = string })
}

variable "bucket_name" {
  description = "Name of the bucket; null = <cluster_name>-kv-<account id>."
  type        = string
  default     = null
}

variable "kv_prefix" {
  description = "Object keys of KV blocks begin with it, then a slash. Example: \"kv\"."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$", var.kv_prefix)) && length(var.kv_prefix) <= 256
    error_message = "kv_prefix must be names of letters, digits, dots, _ or - with slashes between, such as kv or team/kv."
  }
}

variable "kv_expire_days" {
  description = "Blocks older than this are deleted by S3."
  type        = number

  validation {
    condition     = var.kv_expire_days >= 1 && floor(var.kv_expire_days) == var.kv_expire_days
    error_message = "kv_expire_days must be a whole number of days, 1 or more."
  }
}

variable "force_destroy" {
  description = "true = terraform destroy deletes the blocks, too; false = it refuses while there are some."
  type        = bool
}

variable "s3_endpoint_id" {
  description = "The VPC's S3 endpoint: blocks are read and written through nothing else."
  type        = string
}
