variable "cluster_name" {
  description = "Name of the cluster, in names and tags. Example: \"samovar-dev\"."
  type        = string
}

variable "account" {
  description = "Where everything is: AWS account id, partition (\"aws\") and region."
  type        = object({ id = string, partition = string, region = string })
}

variable "vpc_cidr" {
  description = "Addresses of the VPC, /16 to /20. Example: \"10.60.0.0/16\"."
  type        = string

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && try(contains(range(16, 21), tonumber(split("/", var.vpc_cidr)[1])), false)
    error_message = "vpc_cidr must be an IPv4 range of /16 to /20, such as 10.60.0.0/16."
  }
}

variable "availability_zones" {
  description = "Zones with a private subnet each, 2 to 6: the load balancer wants two. Example: [\"us-east-1a\", \"us-east-1b\"]."
  type        = list(string)

  validation {
    condition     = length(var.availability_zones) >= 2 && length(var.availability_zones) <= 6 && length(distinct(var.availability_zones)) == length(var.availability_zones)
    error_message = "availability_zones must name 2 to 6 different zones."
  }
}

variable "nat" {
  description = "The way to the internet: \"none\" (closed VPC), \"single\" (one NAT gateway) or \"per_az\" (one in each zone)."
  type        = string

  validation {
    condition     = contains(["none", "single", "per_az"], var.nat)
    error_message = "nat must be \"none\", \"single\" or \"per_az\"."
  }
}

variable "interface_endpoints" {
  description = "AWS services with an endpoint of their own in each subnet (each costs by the hour and zone). Example: [\"ec2\", \"ssm\"]."
  type        = set(string)
}

variable "ssh_cidrs" {
  description = "Private networks, such as a VPN, that reach nodes by SSH. Empty = only AWS Session Manager does."
  type        = set(string)

  validation {
    condition     = alltrue([for cidr in var.ssh_cidrs : can(cidrhost(cidr, 0)) && try(tonumber(split("/", cidr)[1]) >= 8, false)])
    error_message = "ssh_cidrs must be IPv4 ranges of /8 or smaller: nodes are never open to the internet."
  }
}

variable "kms_key_arn" {
  description = "KMS key of the flow logs."
  type        = string
}

variable "flow_log_days" {
  description = "Days that flow logs are kept."
  type        = number
}
