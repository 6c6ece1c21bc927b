variable "cluster_name" {
  description = "Name of the cluster, and so of the load balancer. Example: \"samovar-dev\"."
  type        = string
}

variable "vpc_id" {
  description = "The VPC."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets in two zones or more."
  type        = list(string)
}

variable "node_security_group_id" {
  description = "Security group of the nodes."
  type        = string
}

variable "serve_port" {
  description = "Port of Serve's proxy on every node: server.port in Samovar's settings."
  type        = number

  validation {
    condition     = var.serve_port >= 1 && var.serve_port <= 65535
    error_message = "serve_port must be a TCP port, 1 to 65535."
  }
}

variable "client_cidrs" {
  description = "Who may send requests. Example: [\"10.0.0.0/8\"]."
  type        = set(string)

  validation {
    condition     = alltrue([for cidr in var.client_cidrs : can(cidrhost(cidr, 0)) && try(tonumber(split("/", cidr)[1]) >= 8, false)])
    error_message = "client_cidrs must be IPv4 ranges of /8 or smaller: the load balancer is internal."
  }
}

variable "idle_timeout_s" {
  description = "A stream silent for so long is cut; a prompt may be long in the queue before its first word."
  type        = number

  validation {
    condition     = var.idle_timeout_s >= 60 && var.idle_timeout_s <= 4000
    error_message = "idle_timeout_s must be 60 to 4000 seconds (what AWS allows, and no less than a minute)."
  }
}

variable "drain_s" {
  description = "A node that leaves may finish its answers for so long."
  type        = number

  validation {
    condition     = var.drain_s >= 0 && var.drain_s <= 3600
    error_message = "drain_s must be 0 to 3600 seconds."
  }
}

variable "certificate_arn" {
  description = "ACM certificate for HTTPS; null = plain HTTP inside the VPC."
  type        = string
}

variable "domain_name" {
  description = "Name on the certificate, which clients use; null = the load balancer's own. Example: \"chat.example.com\"."
  type        = string
}

variable "zone_id" {
  description = "Route 53 zone that gets a record of domain_name; null = you make it elsewhere."
  type        = string
}

variable "access_logs_bucket" {
  description = "Your bucket for access logs (its policy must let the load balancer write); null = no logs."
  type        = string
}

variable "deletion_protection" {
  description = "true = terraform destroy refuses to end the load balancer."
  type        = bool
}
