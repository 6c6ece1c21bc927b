# A launch template per pool, and the image of all nodes. Starts no machine: Ray does, in cluster.yaml's numbers.
#
# No template has user_data: Ray copies it already encoded and encodes it again, and cloud-init ignores the result.
# Nodes are set up by Ray's own commands instead.

locals {
  efa_pools = { for name, pool in var.pools : name => pool if pool.efa_interfaces > 0 }
  ami_id    = coalesce(var.ami_id, one(terraform_data.ami[*].output))

  # All machines of a placement group, and so of an EFA pool, are in one zone.
  zones = {
    for name, pool in var.pools : name => (
      pool.zone != null ? [pool.zone] : (pool.efa_interfaces > 0 ? [sort(keys(var.subnet_ids))[0]] : sort(keys(var.subnet_ids)))
    )
  }
  key_name = var.ssh_public_key == null ? var.key_name : aws_key_pair.this[0].key_name
}

data "aws_ssm_parameter" "ami" {
  count = var.ami_id == null ? 1 : 0

  name = var.ami_ssm_parameter
}

# The image of the first apply, not the newest: the head may launch only this one, from the templates' versions that it
# knows, and with another one `samovar up` would replace it. The README says how to move on.
resource "terraform_data" "ami" {
  count = var.ami_id == null ? 1 : 0

  input = data.aws_ssm_parameter.ami[0].insecure_value

  lifecycle {
    ignore_changes = [input]
  }
}

resource "aws_key_pair" "this" {
  count = var.ssh_public_key == null ? 0 : 1

  key_name   = var.cluster_name
  public_key = var.ssh_public_key
}

resource "aws_placement_group" "efa" {
  for_each = local.efa_pools

  name     = "${var.cluster_name}-${each.key}"
  strategy = "cluster"
}

resource "aws_launch_template" "pool" {
  for_each = var.pools

  name                   = "${var.cluster_name}-${each.key}"
  description            = "Workers of Samovar's pool ${each.key}"
  update_default_version = true

  image_id                             = local.ami_id
  instance_type                        = each.value.instance_type
  key_name                             = local.key_name
  ebs_optimized                        = true
  instance_initiated_shutdown_behavior = "terminate"

  # With interfaces of its own a template must say the group there, else Ray's request says it.
  vpc_security_group_ids = each.value.efa_interfaces > 0 ? null : [var.security_group_id]

  iam_instance_profile {
    arn = var.worker_instance_profile_arn
  }

  metadata_options {
    #checkov:skip=CKV_AWS_341:a container is one hop farther away than the machine
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }

  block_device_mappings {
    device_name = var.root_device
    ebs {
      volume_type           = "gp3"
      volume_size           = each.value.disk_gib
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "instance_market_options" {
    for_each = each.value.market == "spot" ? [1] : []
    content {
      market_type = "spot"
      spot_options {
        spot_instance_type             = "one-time"
        instance_interruption_behavior = "terminate"
      }
    }
  }

  # Card 0 carries the address; the cards behind it start at device 1.
  dynamic "network_interfaces" {
    for_each = range(each.value.efa_interfaces)
    content {
      device_index                = network_interfaces.value == 0 ? 0 : 1
      network_card_index          = network_interfaces.value
      interface_type              = "efa"
      subnet_id                   = var.subnet_ids[local.zones[each.key][0]]
      security_groups             = [var.security_group_id]
      associate_public_ip_address = false
      delete_on_termination       = true
    }
  }

  dynamic "placement" {
    for_each = each.value.efa_interfaces > 0 ? [1] : []
    content {
      group_name = aws_placement_group.efa[each.key].name
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = each.value.capacity_reservation_id == null ? [] : [each.value.capacity_reservation_id]
    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume"])
    content {
      resource_type = tag_specifications.key
      tags          = { samovar-cluster = var.cluster_name, samovar-pool = each.key }
    }
  }
}
