# Subnets, ways out, and who may talk to whom.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  cluster_name        = "samovar-test"
  account             = { id = "123456789012", partition = "aws", region = "eu-west-1" }
  vpc_cidr            = "10.60.0.0/16"
  availability_zones  = ["eu-west-1a", "eu-west-1b"]
  nat                 = "none"
  interface_endpoints = ["ec2", "ssm"]
  ssh_cidrs           = []
  kms_key_arn         = "arn:aws:kms:eu-west-1:123456789012:key/0"
  flow_log_days       = 7
}

run "closed" {
  module { source = "./modules/network" }

  assert {
    condition     = length(aws_internet_gateway.this) + length(aws_nat_gateway.this) + length(aws_subnet.public) + length(aws_route.nat) == 0
    error_message = "A closed VPC must have no way to the internet."
  }

  assert {
    condition     = length(aws_vpc_security_group_egress_rule.nodes_internet) + length(aws_vpc_security_group_ingress_rule.nodes_ssh) == 0
    error_message = "Nodes of a closed VPC must reach no internet and be reached by no SSH."
  }

  assert {
    condition     = length(aws_default_security_group.closed.ingress) + length(aws_default_security_group.closed.egress) == 0
    error_message = "The default security group must let nothing through."
  }

  # EFA passes only where both rules name the group itself, for all protocols.
  assert {
    condition = alltrue([
      for rule in [aws_vpc_security_group_ingress_rule.nodes_self, aws_vpc_security_group_egress_rule.nodes_self] :
      rule.ip_protocol == "-1" && rule.security_group_id == aws_security_group.nodes.id && rule.referenced_security_group_id == aws_security_group.nodes.id
    ])
    error_message = "The nodes' group must name itself for all protocols, both ways."
  }

  assert {
    condition = alltrue([
      for subnet in aws_subnet.private : !subnet.map_public_ip_on_launch
    ]) && toset([for subnet in aws_subnet.private : subnet.cidr_block]) == toset(["10.60.0.0/20", "10.60.16.0/20"])
    error_message = "There must be a private subnet in each zone."
  }

  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway" && toset(aws_vpc_endpoint.s3.route_table_ids) == toset([for table in aws_route_table.private : table.id])
    error_message = "The S3 gateway must stand in every private route table."
  }

  assert {
    condition     = toset([for endpoint in aws_vpc_endpoint.interface : endpoint.service_name]) == toset(["com.amazonaws.eu-west-1.ec2", "com.amazonaws.eu-west-1.ssm"])
    error_message = "There must be an endpoint of each service named."
  }

  assert {
    condition     = aws_flow_log.this.traffic_type == "ALL" && aws_cloudwatch_log_group.flow.kms_key_id == var.kms_key_arn
    error_message = "All traffic must be logged, encrypted."
  }
}

run "one_nat" {
  module { source = "./modules/network" }
  variables { nat = "single" }

  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_route.nat) == 2 && length(aws_internet_gateway.this) == 1
    error_message = "Both zones must go out through one NAT gateway."
  }

  assert {
    condition     = aws_vpc_security_group_egress_rule.nodes_internet[0].from_port == 443 && aws_vpc_security_group_egress_rule.nodes_internet[0].to_port == 443
    error_message = "Only HTTPS may go to the internet."
  }
}

run "nat_per_zone" {
  module { source = "./modules/network" }
  variables {
    nat       = "per_az"
    ssh_cidrs = ["10.8.0.0/24"]
  }

  assert {
    condition = alltrue([
      for zone, route in aws_route.nat : route.nat_gateway_id == aws_nat_gateway.this[zone].id
    ]) && length(aws_nat_gateway.this) == 2
    error_message = "Each zone must go out through its own NAT gateway."
  }

  assert {
    condition     = [for rule in aws_vpc_security_group_ingress_rule.nodes_ssh : rule.cidr_ipv4] == ["10.8.0.0/24"]
    error_message = "SSH must come from the named networks only."
  }
}

run "ssh_from_anywhere" {
  command = plan
  module { source = "./modules/network" }
  variables { ssh_cidrs = ["0.0.0.0/0"] }
  expect_failures = [var.ssh_cidrs]
}

run "one_zone" {
  command = plan
  module { source = "./modules/network" }
  variables { availability_zones = ["eu-west-1a"] }
  expect_failures = [var.availability_zones]
}

run "unknown_nat" {
  command = plan
  module { source = "./modules/network" }
  variables { nat = "yes" }
  expect_failures = [var.nat]
}

run "small_vpc" {
  command = plan
  module { source = "./modules/network" }
  variables { vpc_cidr = "10.60.0.0/24" }
  expect_failures = [var.vpc_cidr]
}
