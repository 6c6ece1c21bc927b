# The whole stack, and what it tells the renderer.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  cluster_name       = "samovar-test"
  region             = "eu-west-1"
  availability_zones = ["eu-west-1a", "eu-west-1b"]
  client_cidrs       = ["10.60.0.0/16"]
  certificate_arn    = null
  key_name           = "ops"
  pools = {
    floor = { instance_type = "g6e.4xlarge", min_workers = 1, max_workers = 2, gpus = 1, nvme_disks = 1 }
    spot  = { instance_type = "g6e.4xlarge", market = "spot", max_workers = 8, idle_timeout_min = 5, gpus = 1, nvme_disks = 1 }
    efa = {
      instance_type = "g6e.12xlarge", max_workers = 2, gpus = 4, nvme_disks = 2, efa_interfaces = 1, zone = "eu-west-1b"
    }
  }
}

run "apply" {
  assert {
    condition = toset(keys(output.samovar)) == toset([
      "cluster_name", "region", "key_name", "head", "worker_instance_profile_arn", "security_group_id", "subnet_ids",
      "pools", "kv", "kms_key_arn", "ssm_prefix", "target_group_arn", "endpoint_url", "log_group",
    ])
    error_message = "The output samovar must have exactly the keys that cluster/launch/terraform.py reads."
  }

  assert {
    condition = alltrue([for pool in output.samovar.pools : toset(keys(pool)) == toset([
      "launch_template_id", "launch_template_version", "instance_type", "market", "min_workers", "max_workers",
      "idle_timeout_min", "gpus", "nvme_disks", "efa_interfaces", "subnet_ids", "has_own_network",
    ])])
    error_message = "A pool must have exactly the keys that cluster/launch/terraform.py reads."
  }

  assert {
    condition     = length(output.samovar.subnet_ids) == 2 && output.samovar.head.subnet_id == output.samovar.subnet_ids[0]
    error_message = "The head must be in the first of two subnets."
  }

  assert {
    condition     = output.samovar.head.ami_id == "ami-0123456789abcdef0" && output.samovar.key_name == "ops"
    error_message = "The head must have the parameter's image and the given key."
  }

  assert {
    condition     = length(output.samovar.pools.spot.subnet_ids) == 2 && !output.samovar.pools.spot.has_own_network
    error_message = "A pool without EFA must be in all zones, in subnets that cluster.yaml names."
  }

  assert {
    condition     = output.samovar.pools.efa.has_own_network && output.samovar.pools.efa.subnet_ids == [output.samovar.subnet_ids[1]]
    error_message = "An EFA pool must be in its zone, with interfaces of its template."
  }

  assert {
    condition     = output.samovar.ssm_prefix == "/samovar/samovar-test" && output.samovar.kv.prefix == "kv"
    error_message = "The SSM parameters must lie below /samovar/<cluster_name>, the blocks below kv."
  }

  # The token and the secrets are put into SSM by hand: Terraform knows their names only.
  assert {
    condition     = length(regexall("(?i)(secret|password|token|api_key|private_key|access_key)", jsonencode(output.samovar))) == 0
    error_message = "No secret may stand in the outputs, and nothing that looks like one."
  }
}
