# Launch templates: what every machine must be, and what EFA, spot and a reservation add.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  cluster_name                = "samovar-test"
  ami_id                      = null
  ami_ssm_parameter           = "/some/parameter"
  root_device                 = "/dev/sda1"
  ssh_public_key              = null
  key_name                    = null
  worker_instance_profile_arn = "arn:aws:iam::123456789012:instance-profile/samovar-test-worker"
  subnet_ids                  = { eu-west-1a = "subnet-a", eu-west-1b = "subnet-b" }
  security_group_id           = "sg-0123456789abcdef0"
  pools = {
    spot = {
      instance_type  = "g6.xlarge", market = "spot", min_workers = 0, max_workers = 4, idle_timeout_min = 5, gpus = 1, nvme_disks = 1,
      efa_interfaces = 0, disk_gib = 200, zone = null, capacity_reservation_id = null
    }
    efa = {
      instance_type = "p5.48xlarge", market = "on-demand", min_workers = 0, max_workers = 2, idle_timeout_min = 20, gpus = 8,
      nvme_disks    = 8, efa_interfaces = 32, disk_gib = 500, zone = "eu-west-1b", capacity_reservation_id = "cr-0123456789abcdef0"
    }
  }
}

run "templates" {
  module { source = "./modules/compute" }

  assert {
    condition = alltrue([
      for template in aws_launch_template.pool : template.metadata_options[0].http_tokens == "required" && template.metadata_options[0].http_put_response_hop_limit == 2
    ])
    error_message = "Instances must want IMDSv2, and a container must reach it."
  }

  assert {
    condition = alltrue(flatten([
      for template in aws_launch_template.pool : [
        for disk in template.block_device_mappings : disk.ebs[0].encrypted == "true" && disk.ebs[0].volume_type == "gp3" && disk.ebs[0].delete_on_termination == "true"
      ]
    ]))
    error_message = "Disks must be encrypted gp3 that go with the machine."
  }

  # Ray encodes it a second time, see modules/compute/main.tf.
  assert {
    condition     = alltrue([for template in aws_launch_template.pool : template.user_data == null])
    error_message = "No template may have user_data."
  }

  assert {
    condition     = alltrue([for template in aws_launch_template.pool : template.image_id == "ami-0123456789abcdef0"])
    error_message = "The image must be the parameter's."
  }

  assert {
    condition     = aws_launch_template.pool["spot"].instance_market_options[0].market_type == "spot" && length(aws_launch_template.pool["efa"].instance_market_options) == 0
    error_message = "Only the spot pool must be spot."
  }

  assert {
    condition = length(aws_launch_template.pool["efa"].network_interfaces) == 32 && alltrue([
      for index, card in aws_launch_template.pool["efa"].network_interfaces :
      card.interface_type == "efa" && card.network_card_index == index && card.device_index == (index == 0 ? 0 : 1) &&
      card.subnet_id == "subnet-b" && card.security_groups == toset(["sg-0123456789abcdef0"])
    ])
    error_message = "Each network card must have its EFA interface, in the pool's zone and the nodes' group."
  }

  assert {
    condition     = aws_launch_template.pool["efa"].placement[0].group_name == "samovar-test-efa" && aws_placement_group.efa["efa"].strategy == "cluster"
    error_message = "Machines with EFA must be near each other."
  }

  assert {
    condition     = aws_launch_template.pool["efa"].capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "The pool must use its reservation."
  }

  assert {
    condition     = length(aws_launch_template.pool["spot"].network_interfaces) + length(aws_launch_template.pool["spot"].placement) == 0 && length(aws_placement_group.efa) == 1
    error_message = "A pool without EFA has no interfaces and no placement group of its own."
  }

  assert {
    condition     = output.pools.efa.subnet_ids == ["subnet-b"] && output.pools.efa.has_own_network && output.pools.spot.subnet_ids == ["subnet-a", "subnet-b"]
    error_message = "Outputs must name the subnets in which a pool may be."
  }
}

run "a_newer_image" {
  module { source = "./modules/compute" }

  override_data {
    target = data.aws_ssm_parameter.ami
    values = { insecure_value = "ami-0aaaaaaaaaaaaaaaa" }
  }

  assert {
    condition     = data.aws_ssm_parameter.ami[0].insecure_value == "ami-0aaaaaaaaaaaaaaaa"
    error_message = "Nothing is tried without a newer image."
  }

  assert {
    condition     = output.ami_id == "ami-0123456789abcdef0" && alltrue([for template in aws_launch_template.pool : template.image_id == output.ami_id])
    error_message = "A later apply must keep the image: the head that runs may launch no other."
  }
}

run "keys" {
  module { source = "./modules/compute" }
  variables {
    ami_id         = "ami-0fedcba9876543210"
    ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExample"
  }

  assert {
    condition     = length(data.aws_ssm_parameter.ami) == 0 && output.ami_id == "ami-0fedcba9876543210"
    error_message = "A given image must not be asked for."
  }

  assert {
    condition     = output.key_name == "samovar-test" && alltrue([for template in aws_launch_template.pool : template.key_name == "samovar-test"])
    error_message = "The given key must open the workers."
  }
}
