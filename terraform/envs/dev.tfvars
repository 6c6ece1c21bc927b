# Small and cheap to leave: one GPU by the hour, more on the spot market, one NAT gateway, no endpoints but S3's.

cluster_name       = "samovar-dev"
region             = "us-east-1"
availability_zones = ["us-east-1a", "us-east-1b"]

nat                 = "single"
interface_endpoints = []
client_cidrs        = ["10.60.0.0/16"]

head = { instance_type = "m7i.xlarge", disk_gib = 150 }

pools = {
  base = {
    instance_type = "g6.xlarge"
    max_workers   = 1
    gpus          = 1
    nvme_disks    = 1
  }
  spot = {
    instance_type    = "g6.xlarge"
    market           = "spot"
    max_workers      = 2
    idle_timeout_min = 5
    gpus             = 1
    nvme_disks       = 1
  }
}

kv_expire_days   = 3
kv_force_destroy = true
log_days         = 7

# Plain HTTP inside the VPC: API keys can be read on the way. For trying things out only.
certificate_arn = null
