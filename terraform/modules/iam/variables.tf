variable "cluster_name" {
  description = "Name of the cluster: of the roles, and of the tag ray-cluster-name. Example: \"samovar-dev\"."
  type        = string
}

variable "account" {
  description = "Where everything is: AWS account id, partition (\"aws\") and region."
  type        = object({ id = string, partition = string, region = string })
}

variable "kv_bucket_arn" {
  description = "Bucket of KV blocks."
  type        = string
}

variable "kv_prefix" {
  description = "Nodes touch only objects below it. Example: \"kv\"."
  type        = string
}

variable "kms_key_arn" {
  description = "Key of the bucket and of the SSM parameters."
  type        = string
}

variable "ssm_prefix" {
  description = "Nodes read the SSM parameters below it. Example: \"/samovar/samovar-dev\"."
  type        = string

  validation {
    condition     = can(regex("^(/[A-Za-z0-9_.-]+)+$", var.ssm_prefix))
    error_message = "ssm_prefix must begin with a slash and not end with one, such as /samovar/samovar-dev."
  }
}

variable "log_group_arn" {
  description = "Log group that nodes write to."
  type        = string
}

variable "target_group_arn" {
  description = "Target group that nodes register with."
  type        = string
}

variable "launch_template_arns" {
  description = "Launch templates of the pools."
  type        = list(string)
}

variable "instance_types" {
  description = "The head launches no other types. Example: [\"g6.xlarge\"]."
  type        = list(string)
}

variable "worker_ami_id" {
  description = "The head launches no other image."
  type        = string
}

variable "subnet_arns" {
  description = "The head launches into no other subnets."
  type        = list(string)
}

variable "security_group_arn" {
  description = "The head gives workers no other security group."
  type        = string
}

variable "key_name" {
  description = "SSH key pair of the workers; null = none."
  type        = string
}

variable "capacity_reservation_ids" {
  description = "Capacity reservations of the pools. Example: [\"cr-0123456789abcdef0\"]."
  type        = list(string)
}

variable "ecr_repository_arns" {
  description = "ECR repositories that nodes pull images from; empty = none."
  type        = list(string)
}

variable "extra_policy_arns" {
  description = "More policies for both roles, such as one that reads your bucket of models."
  type        = set(string)
}

variable "create_spot_role" {
  description = "true = make the account's service-linked role for spot instances; AWS refuses where it exists."
  type        = bool
}
