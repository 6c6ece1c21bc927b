# `terraform output -json` is the input of `samovar up`: cluster/launch/terraform.py is its model. No secrets here.

output "samovar" {
  description = "What `samovar render` and `samovar up` read."
  value = {
    cluster_name = var.cluster_name
    region       = var.region
    key_name     = module.compute.key_name

    head = {
      instance_type        = var.head.instance_type
      ami_id               = module.compute.ami_id
      instance_profile_arn = module.iam.head_instance_profile_arn
      subnet_id            = local.subnet_ids[var.availability_zones[0]]
      disk_gib             = var.head.disk_gib
    }

    worker_instance_profile_arn = module.iam.worker_instance_profile_arn
    security_group_id           = module.network.node_security_group.id
    subnet_ids                  = [for zone in var.availability_zones : local.subnet_ids[zone]]
    pools                       = module.compute.pools

    kv = {
      bucket = module.storage.bucket.name
      prefix = var.kv_prefix
      region = var.region
    }

    kms_key_arn      = module.storage.kms_key_arn
    ssm_prefix       = local.ssm_prefix
    target_group_arn = module.edge.target_group_arn
    endpoint_url     = module.edge.endpoint_url
    log_group        = module.observability.log_group.name
  }
}

output "head_policy" {
  description = "What the head node may do: its IAM policy, JSON."
  value       = module.iam.head_policy
}

output "worker_policy" {
  description = "What a worker may do: its IAM policy, JSON."
  value       = module.iam.worker_policy
}
