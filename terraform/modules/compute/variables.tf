variable "cluster_name" {
  description = "Name of the cluster, in names and tags. Example: \"samovar-dev\"."
  type        = string
}

variable "pools" {
  description = "Pools of workers by name, as the root module's variable says."
  type = map(object({
    instance_type           = string
    market                  = string
    min_workers             = number
    max_workers             = number
    idle_timeout_min        = number
    gpus                    = number
    nvme_disks              = number
    efa_interfaces          = number
    disk_gib                = number
    zone                    = string
    capacity_reservation_id = string
  }))
}

variable "ami_id" {
  description = "Image of all nodes; null = ask ami_ssm_parameter. Example: \"ami-0123456789abcdef0\"."
  type        = string
}

variable "ami_ssm_parameter" {
  description = "Public SSM parameter that names the image when ami_id is null."
  type        = string
}

variable "root_device" {
  description = "Device name of the image's root disk. Example: \"/dev/sda1\"."
  type        = string
}

variable "ssh_public_key" {
  description = "Public key that opens the nodes; null = key_name."
  type        = string
}

variable "key_name" {
  description = "A key pair that exists already; null = none."
  type        = string
}

variable "worker_instance_profile_arn" {
  description = "Instance profile of the workers."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets by zone. Example: {us-east-1a = \"subnet-0123456789abcdef0\"}."
  type        = map(string)
}

variable "security_group_id" {
  description = "Security group of the nodes."
  type        = string
}
