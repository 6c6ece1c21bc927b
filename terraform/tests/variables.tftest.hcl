# Each rule of the root module's variables fires. Nothing is applied.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  cluster_name       = "samovar-test"
  region             = "eu-west-1"
  availability_zones = ["eu-west-1a", "eu-west-1b"]
  client_cidrs       = ["10.60.0.0/16"]
  certificate_arn    = null
  pools              = { base = { instance_type = "g6.xlarge", max_workers = 1 } }
}

run "these_are_good" {
  command = plan
}

run "name_too_long" {
  command = plan
  variables { cluster_name = "a-name-that-no-load-balancer-can-have" }
  expect_failures = [var.cluster_name]
}

run "name_that_aws_keeps" {
  command = plan
  variables { cluster_name = "internal-chat" }
  expect_failures = [var.cluster_name]
}

run "region_is_a_zone" {
  command = plan
  variables { region = "eu-west-1a" }
  expect_failures = [var.region]
}

run "zones_of_another_region" {
  command = plan
  variables { availability_zones = ["us-east-1a", "us-east-1b"] }
  expect_failures = [var.availability_zones]
}

run "closed_vpc_without_endpoints" {
  command = plan
  variables {
    nat                 = "none"
    interface_endpoints = ["ec2", "ssm"]
  }
  expect_failures = [var.interface_endpoints]
}

run "head_without_a_disk" {
  command = plan
  variables { head = { disk_gib = 0 } }
  expect_failures = [var.head]
}

run "no_pool" {
  command = plan
  variables { pools = {} }
  expect_failures = [var.pools]
}

run "pool_called_head" {
  command = plan
  variables { pools = { head = { instance_type = "g6.xlarge", max_workers = 1 } } }
  expect_failures = [var.pools]
}

run "unknown_market" {
  command = plan
  variables { pools = { base = { instance_type = "g6.xlarge", max_workers = 1, market = "black" } } }
  expect_failures = [var.pools]
}

run "more_at_least_than_at_most" {
  command = plan
  variables { pools = { base = { instance_type = "g6.xlarge", max_workers = 1, min_workers = 2 } } }
  expect_failures = [var.pools]
}

run "half_a_gpu" {
  command = plan
  variables { pools = { base = { instance_type = "g6.xlarge", max_workers = 1, gpus = 0.5 } } }
  expect_failures = [var.pools]
}

run "no_idle_time" {
  command = plan
  variables { pools = { base = { instance_type = "g6.xlarge", max_workers = 1, idle_timeout_min = 0 } } }
  expect_failures = [var.pools]
}

run "pool_in_a_zone_without_subnet" {
  command = plan
  variables { pools = { base = { instance_type = "g6.xlarge", max_workers = 1, zone = "eu-west-1c" } } }
  expect_failures = [var.pools]
}

run "reservation_for_spot" {
  command = plan
  variables {
    pools = {
      base = { instance_type = "g6.xlarge", max_workers = 1, market = "spot", capacity_reservation_id = "cr-0123456789abcdef0" }
    }
  }
  expect_failures = [var.pools]
}

run "ami_by_name" {
  command = plan
  variables { ami_id = "ubuntu" }
  expect_failures = [var.ami_id]
}

run "private_key_given" {
  command = plan
  variables { ssh_public_key = "-----BEGIN OPENSSH PRIVATE KEY-----" }
  expect_failures = [var.ssh_public_key]
}

run "two_keys" {
  command = plan
  variables {
    ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExample"
    key_name       = "ops"
  }
  expect_failures = [var.key_name]
}

run "certificate_without_a_name" {
  command = plan
  variables { certificate_arn = "arn:aws:acm:eu-west-1:123456789012:certificate/0" }
  expect_failures = [var.domain_name]
}

run "zone_without_a_name" {
  command = plan
  variables { zone_id = "Z0123456789" }
  expect_failures = [var.zone_id]
}

run "days_that_cloudwatch_does_not_know" {
  command = plan
  variables { log_days = 31 }
  expect_failures = [var.log_days]
}
