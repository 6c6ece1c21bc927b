# Everything a Samovar cluster stands on. Machines are Ray's: `samovar up` reads this module's outputs.

data "aws_caller_identity" "this" {}

data "aws_partition" "this" {}

locals {
  account = {
    id        = data.aws_caller_identity.this.account_id
    partition = data.aws_partition.this.partition
    region    = var.region
  }
  ssm_prefix = "/samovar/${var.cluster_name}"
  subnet_ids = { for zone, subnet in module.network.private_subnets : zone => subnet.id }
}

module "storage" {
  source = "./modules/storage"

  cluster_name   = var.cluster_name
  account        = local.account
  bucket_name    = var.kv_bucket_name
  kv_prefix      = var.kv_prefix
  kv_expire_days = var.kv_expire_days
  force_destroy  = var.kv_force_destroy
  s3_endpoint_id = module.network.s3_endpoint_id
}

module "network" {
  source = "./modules/network"

  cluster_name        = var.cluster_name
  account             = local.account
  vpc_cidr            = var.vpc_cidr
  availability_zones  = var.availability_zones
  nat                 = var.nat
  interface_endpoints = var.interface_endpoints
  ssh_cidrs           = var.ssh_cidrs
  kms_key_arn         = module.storage.kms_key_arn
  flow_log_days       = var.log_days
}

module "compute" {
  source = "./modules/compute"

  cluster_name                = var.cluster_name
  pools                       = var.pools
  ami_id                      = var.ami_id
  ami_ssm_parameter           = var.ami_ssm_parameter
  root_device                 = var.root_device
  ssh_public_key              = var.ssh_public_key
  key_name                    = var.key_name
  worker_instance_profile_arn = module.iam.worker_instance_profile_arn
  subnet_ids                  = local.subnet_ids
  security_group_id           = module.network.node_security_group.id
}

module "edge" {
  source = "./modules/edge"

  cluster_name           = var.cluster_name
  vpc_id                 = module.network.vpc_id
  subnet_ids             = values(local.subnet_ids)
  node_security_group_id = module.network.node_security_group.id
  serve_port             = var.serve_port
  client_cidrs           = var.client_cidrs
  idle_timeout_s         = var.idle_timeout_s
  drain_s                = var.drain_s
  certificate_arn        = var.certificate_arn
  domain_name            = var.domain_name
  zone_id                = var.zone_id
  access_logs_bucket     = var.access_logs_bucket
  deletion_protection    = var.deletion_protection
}

module "observability" {
  source = "./modules/observability"

  cluster_name     = var.cluster_name
  kms_key_arn      = module.storage.kms_key_arn
  log_days         = var.log_days
  kv_bucket_name   = module.storage.bucket.name
  edge_metrics     = module.edge.metrics
  alarm_emails     = var.alarm_emails
  errors_5min_max  = var.errors_5min_max
  first_word_s_max = var.first_word_s_max
  kv_bytes_max     = var.kv_bytes_max
  monthly_usd_max  = var.monthly_usd_max
}

module "iam" {
  source = "./modules/iam"

  cluster_name             = var.cluster_name
  account                  = local.account
  kv_bucket_arn            = module.storage.bucket.arn
  kv_prefix                = var.kv_prefix
  kms_key_arn              = module.storage.kms_key_arn
  ssm_prefix               = local.ssm_prefix
  log_group_arn            = module.observability.log_group.arn
  target_group_arn         = module.edge.target_group_arn
  launch_template_arns     = module.compute.launch_template_arns
  instance_types           = distinct([for pool in var.pools : pool.instance_type])
  worker_ami_id            = module.compute.ami_id
  subnet_arns              = [for subnet in module.network.private_subnets : subnet.arn]
  security_group_arn       = module.network.node_security_group.arn
  key_name                 = module.compute.key_name
  capacity_reservation_ids = compact([for pool in var.pools : pool.capacity_reservation_id])
  ecr_repository_arns      = var.ecr_repository_arns
  extra_policy_arns        = var.extra_policy_arns
  create_spot_role         = var.create_spot_role
}
