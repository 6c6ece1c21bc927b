# Every optional part at once: what dev and prod leave out is planned and applied, too.

cluster_name       = "samovar-all"
region             = "eu-west-1"
availability_zones = ["eu-west-1a", "eu-west-1b"]
tags               = { team = "chat" }

nat       = "per_az"
ssh_cidrs = ["10.8.0.0/24"]

kv_bucket_name = "samovar-all-kv"

pools = {
  reserved = {
    instance_type           = "p5.48xlarge"
    max_workers             = 2
    gpus                    = 8
    nvme_disks              = 8
    efa_interfaces          = 32
    zone                    = "eu-west-1b"
    capacity_reservation_id = "cr-0123456789abcdef0"
  }
  spot = {
    instance_type = "g6.12xlarge"
    market        = "spot"
    max_workers   = 2
    gpus          = 4
    nvme_disks    = 4
  }
}

ami_id         = "ami-0123456789abcdef0"
ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHRlc3Q= test"

ecr_repository_arns = ["arn:aws:ecr:eu-west-1:123456789012:repository/samovar"]
extra_policy_arns   = ["arn:aws:iam::123456789012:policy/models"]
create_spot_role    = true

client_cidrs        = ["10.0.0.0/8"]
certificate_arn     = "arn:aws:acm:eu-west-1:123456789012:certificate/00000000-0000-0000-0000-000000000000"
domain_name         = "chat.example.com"
zone_id             = "Z0123456789ABCDEFGHIJ"
access_logs_bucket  = "samovar-all-logs"
deletion_protection = true

alarm_emails    = ["ops@example.com"]
monthly_usd_max = 500
