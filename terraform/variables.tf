# What to build. The modules check what is theirs; here is checked what must fit together.

variable "cluster_name" {
  description = "Name of the cluster, in names and tags, in Ray and in SSM. Example: \"samovar-dev\"."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,30}[a-z0-9]$", var.cluster_name)) && !startswith(var.cluster_name, "internal-")
    error_message = "cluster_name must be 2 to 32 small letters, digits and dashes, begin with a letter, not end with a dash, and not begin with \"internal-\" (AWS keeps that for load balancers)."
  }
}

variable "region" {
  description = "AWS region. Example: \"us-east-1\"."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region must be a name such as us-east-1."
  }
}

variable "tags" {
  description = "More tags for everything made here. Example: {team = \"chat\"}."
  type        = map(string)
  default     = {}
}

# Network

variable "vpc_cidr" {
  description = "Addresses of the VPC, /16 to /20. Example: \"10.60.0.0/16\"."
  type        = string
  default     = "10.60.0.0/16"
}

variable "availability_zones" {
  description = "Zones with a private subnet each, 2 to 6, best those that sell the pools' types. The head is in the first. Example: [\"us-east-1a\", \"us-east-1b\"]."
  type        = list(string)

  validation {
    condition     = alltrue([for zone in var.availability_zones : startswith(zone, var.region)])
    error_message = "availability_zones must be zones of var.region, such as us-east-1a in us-east-1."
  }
}

variable "nat" {
  description = "The way to the internet: \"none\" (closed VPC), \"single\" (one NAT gateway, one zone's outage cuts all) or \"per_az\" (one in each zone). Each costs by the hour and by the byte."
  type        = string
  default     = "single"
}

variable "interface_endpoints" {
  description = "AWS services with an endpoint of their own; each costs by the hour and zone. A closed VPC (nat = \"none\") needs those of the default; with NAT, [] is the cheapest."
  type        = set(string)
  default = [
    "ec2", "ecr.api", "ecr.dkr", "elasticloadbalancing", "kms", "logs", "monitoring", "ssm", "ssmmessages", "sts",
  ]

  validation {
    condition = var.nat != "none" || length(setsubtract(
      ["ec2", "elasticloadbalancing", "kms", "logs", "ssm", "ssmmessages"], var.interface_endpoints
    )) == 0
    error_message = "With nat = \"none\" nodes reach AWS through interface_endpoints only. Add at least ec2, elasticloadbalancing, kms, logs, ssm and ssmmessages, or set nat."
  }
}

variable "ssh_cidrs" {
  description = "Private networks, such as a VPN, that reach nodes by SSH; /8 or smaller. Empty = only AWS Session Manager does. Example: [\"10.8.0.0/24\"]."
  type        = set(string)
  default     = []
}

# Storage

variable "kv_bucket_name" {
  description = "Name of the bucket of KV blocks; null = <cluster_name>-kv-<account id>."
  type        = string
  default     = null
}

variable "kv_prefix" {
  description = "Object keys of KV blocks begin with it: tiers.s3.prefix of Samovar's settings."
  type        = string
  default     = "kv"
}

variable "kv_expire_days" {
  description = "Blocks older than this are deleted by S3: longer than users stay away."
  type        = number
  default     = 14
}

variable "kv_force_destroy" {
  description = "true = terraform destroy deletes the blocks, too; false = it refuses while there are some."
  type        = bool
  default     = false
}

# Machines

variable "head" {
  description = "The head node: its type (no GPU) and its disk in GiB."
  type = object({
    instance_type = optional(string, "m7i.2xlarge")
    disk_gib      = optional(number, 200)
  })
  default = {}

  validation {
    condition     = var.head.disk_gib >= 8 && var.head.disk_gib <= 16384 && floor(var.head.disk_gib) == var.head.disk_gib
    error_message = "disk_gib of the head must be a whole number, 8 to 16384 (and no less than the image's own disk)."
  }
}

variable "pools" {
  description = <<-EOT
    Pools of workers by name; ray up keeps each between min_workers and max_workers. gpus, nvme_disks and
    efa_interfaces are facts of instance_type; efa_interfaces > 0 makes a placement group in one zone. zone picks one of
    availability_zones (empty = all; an EFA pool: the first). capacity_reservation_id is for on-demand pools.
    Example: {spot = {instance_type = "g6.xlarge", market = "spot", max_workers = 4, gpus = 1, nvme_disks = 1}}.
  EOT
  type = map(object({
    instance_type           = string
    market                  = optional(string, "on-demand")
    min_workers             = optional(number, 0)
    max_workers             = number
    idle_timeout_min        = optional(number, 15)
    gpus                    = optional(number, 0)
    nvme_disks              = optional(number, 0)
    efa_interfaces          = optional(number, 0)
    disk_gib                = optional(number, 200)
    zone                    = optional(string)
    capacity_reservation_id = optional(string)
  }))

  validation {
    condition     = length(var.pools) > 0 && alltrue([for name, pool in var.pools : can(regex("^[a-z][a-z0-9_-]{0,30}$", name)) && name != "head"])
    error_message = "pools must hold one pool or more, with names of small letters, digits, _ and - (and none called head)."
  }

  validation {
    condition     = alltrue([for pool in var.pools : contains(["on-demand", "spot"], pool.market)])
    error_message = "The market of a pool must be \"on-demand\" or \"spot\"."
  }

  validation {
    condition     = alltrue([for pool in var.pools : pool.min_workers <= pool.max_workers && pool.max_workers >= 1 && pool.max_workers <= 1000])
    error_message = "A pool needs min_workers <= max_workers, and max_workers of 1 to 1000."
  }

  validation {
    condition = alltrue(flatten([
      for pool in var.pools : [
        for number in [pool.min_workers, pool.max_workers, pool.gpus, pool.nvme_disks, pool.efa_interfaces, pool.disk_gib] :
        number >= 0 && floor(number) == number
      ]
    ]))
    error_message = "min_workers, max_workers, gpus, nvme_disks, efa_interfaces and disk_gib of a pool must be whole numbers, 0 or more."
  }

  validation {
    condition     = alltrue([for pool in var.pools : pool.idle_timeout_min > 0 && pool.idle_timeout_min <= 1440])
    error_message = "idle_timeout_min of a pool must be more than 0 and at most 1440: Ray ends an idle worker after so many minutes."
  }

  validation {
    condition     = alltrue([for pool in var.pools : pool.zone == null || contains(var.availability_zones, coalesce(pool.zone, "none"))])
    error_message = "The zone of a pool must be one of availability_zones, or empty."
  }

  validation {
    condition     = alltrue([for pool in var.pools : pool.capacity_reservation_id == null || pool.market == "on-demand"])
    error_message = "A pool with a capacity_reservation_id must be of the on-demand market: spot instances use no reservation."
  }
}

variable "ami_id" {
  description = "Image of all nodes, the same until you change it; null = the newest that ami_ssm_parameter names at the first apply. Example: \"ami-0123456789abcdef0\"."
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null || can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "ami_id must be like ami-0123456789abcdef0, or null."
  }
}

variable "ami_ssm_parameter" {
  description = "Public SSM parameter that names the image: Ubuntu with NVIDIA's driver, docker and the SSM agent."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
}

variable "root_device" {
  description = "Device name of the image's root disk: /dev/sda1 for Ubuntu, /dev/xvda for Amazon Linux."
  type        = string
  default     = "/dev/sda1"
}

variable "ssh_public_key" {
  description = "Public key that opens the nodes, for ray up; null = key_name. Example: \"ssh-ed25519 AAAA... ops\"."
  type        = string
  default     = null

  validation {
    condition     = var.ssh_public_key == null || can(regex("^(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/=]+", var.ssh_public_key))
    error_message = "ssh_public_key must be the text of a .pub file, beginning with ssh-ed25519 or ssh-rsa."
  }
}

variable "key_name" {
  description = "A key pair that exists already, instead of ssh_public_key."
  type        = string
  default     = null

  validation {
    condition     = var.key_name == null || var.ssh_public_key == null
    error_message = "Give ssh_public_key (a key pair is made) or key_name (one exists), not both."
  }
}

variable "ecr_repository_arns" {
  description = "ECR repositories that nodes pull Samovar's image from; empty = none."
  type        = list(string)
  default     = []
}

variable "extra_policy_arns" {
  description = "More IAM policies for all nodes, such as one that reads your bucket of models."
  type        = set(string)
  default     = []
}

variable "create_spot_role" {
  description = "true = make the account's service-linked role for spot instances; AWS refuses where it exists."
  type        = bool
  default     = false
}

# Edge

variable "serve_port" {
  description = "Port of Serve's proxies: server.port of Samovar's settings."
  type        = number
  default     = 8000
}

variable "client_cidrs" {
  description = "Who may send requests to the load balancer; /8 or smaller. Example: [\"10.0.0.0/8\"]."
  type        = set(string)
}

variable "idle_timeout_s" {
  description = "A stream silent for so long is cut. A long prompt in a queue is silent, too."
  type        = number
  default     = 900
}

variable "drain_s" {
  description = "A node that leaves the load balancer may finish its answers for so long."
  type        = number
  default     = 300
}

variable "certificate_arn" {
  description = "ACM certificate for HTTPS; null, which must be said, = plain HTTP: API keys cross the network in clear."
  type        = string
}

variable "domain_name" {
  description = "Name on the certificate, which clients use; null = the load balancer's own. Example: \"chat.example.com\"."
  type        = string
  default     = null

  validation {
    condition     = var.certificate_arn == null || var.domain_name != null
    error_message = "certificate_arn needs domain_name, a name on the certificate: the load balancer's own name is on none."
  }
}

variable "zone_id" {
  description = "Route 53 zone that gets a record of domain_name; null = you make it elsewhere."
  type        = string
  default     = null

  validation {
    condition     = var.zone_id == null || var.domain_name != null
    error_message = "zone_id needs domain_name, the name to put into the zone."
  }
}

variable "access_logs_bucket" {
  description = "Your bucket for the load balancer's access logs (its policy must let ELB write); null = none."
  type        = string
  default     = null
}

variable "deletion_protection" {
  description = "true = terraform destroy refuses to end the load balancer."
  type        = bool
  default     = false
}

# Observability

variable "log_days" {
  description = "Days that logs are kept, of those that CloudWatch knows."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_days)
    error_message = "log_days must be 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545 or 731."
  }
}

variable "alarm_emails" {
  description = "Recipients of alarms and budget mails; empty = alarms show in CloudWatch only. Example: [\"ops@example.com\"]."
  type        = set(string)
  default     = []
}

variable "errors_5min_max" {
  description = "More 5xx answers than this in five minutes are an alarm."
  type        = number
  default     = 10
}

variable "first_word_s_max" {
  description = "An alarm when the slowest tenth waits longer than this for its first bytes."
  type        = number
  default     = 10
}

variable "kv_bytes_max" {
  description = "More bytes of KV blocks in the bucket than this are an alarm."
  type        = number
  default     = 10995116277760
}

variable "monthly_usd_max" {
  description = "Budget of a month in US dollars; null = no budget. Example: 500."
  type        = number
  default     = null
}
