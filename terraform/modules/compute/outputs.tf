output "ami_id" {
  description = "Image of all nodes."
  value       = local.ami_id
}

output "key_name" {
  description = "Key pair of the nodes; null = none."
  value       = local.key_name
}

output "launch_template_arns" {
  description = "Launch templates of all pools."
  value       = [for template in aws_launch_template.pool : template.arn]
}

output "pools" {
  description = "The pools, as the renderer of cluster.yaml reads them."
  value = {
    for name, pool in var.pools : name => {
      launch_template_id      = aws_launch_template.pool[name].id
      launch_template_version = tostring(aws_launch_template.pool[name].latest_version)
      instance_type           = pool.instance_type
      market                  = pool.market
      min_workers             = pool.min_workers
      max_workers             = pool.max_workers
      idle_timeout_min        = pool.idle_timeout_min
      gpus                    = pool.gpus
      nvme_disks              = pool.nvme_disks
      efa_interfaces          = pool.efa_interfaces
      subnet_ids              = [for zone in local.zones[name] : var.subnet_ids[zone]]
      has_own_network         = pool.efa_interfaces > 0
    }
  }
}
