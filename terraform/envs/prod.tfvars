# A floor that is always there, spot on top, and a pool with EFA for models over several GPUs. Closed VPC: images come
# from ECR, models from the image or a bucket of yours (extra_policy_arns). Change the names, ranges and addresses.

cluster_name       = "samovar-prod"
region             = "us-east-1"
availability_zones = ["us-east-1a", "us-east-1b", "us-east-1c"]

nat          = "none"
client_cidrs = ["10.0.0.0/8"]

# Requests carry API keys and conversations. `certificate_arn = null` would send them over plain HTTP.
certificate_arn = "arn:aws:acm:us-east-1:123456789012:certificate/00000000-0000-0000-0000-000000000000"
domain_name     = "chat.example.com"

ecr_repository_arns = ["arn:aws:ecr:us-east-1:123456789012:repository/samovar"]

head = { instance_type = "m7i.2xlarge" }

pools = {
  floor = {
    instance_type    = "g6e.4xlarge"
    min_workers      = 2
    max_workers      = 6
    idle_timeout_min = 20
    gpus             = 1
    nvme_disks       = 1
  }
  spot = {
    instance_type    = "g6e.4xlarge"
    market           = "spot"
    max_workers      = 8
    idle_timeout_min = 5
    gpus             = 1
    nvme_disks       = 1
  }
  efa = {
    instance_type    = "g6e.12xlarge"
    max_workers      = 4
    idle_timeout_min = 20
    gpus             = 4
    nvme_disks       = 2
    efa_interfaces   = 1
    zone             = "us-east-1a"
  }
}

kv_expire_days      = 14
deletion_protection = true
log_days            = 90
alarm_emails        = ["ops@example.com"]
monthly_usd_max     = 20000
