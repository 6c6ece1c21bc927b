# The load balancer: internal, patient with streams, and open to the named networks only.

mock_provider "aws" {
  source = "./tests/mocks"

  mock_resource "aws_lb" {
    defaults = { dns_name = "samovar-test-0.elb.amazonaws.com" }
  }
}

variables {
  cluster_name           = "samovar-test"
  vpc_id                 = "vpc-0123456789abcdef0"
  subnet_ids             = ["subnet-a", "subnet-b"]
  node_security_group_id = "sg-0123456789abcdef0"
  serve_port             = 8000
  client_cidrs           = ["10.60.0.0/16"]
  idle_timeout_s         = 900
  drain_s                = 300
  certificate_arn        = null
  domain_name            = null
  zone_id                = null
  access_logs_bucket     = null
  deletion_protection    = false
}

run "http" {
  module { source = "./modules/edge" }

  assert {
    condition     = aws_lb.this.internal && aws_lb.this.idle_timeout == 900 && aws_lb.this.drop_invalid_header_fields
    error_message = "The load balancer must be internal and wait for slow streams."
  }

  assert {
    condition     = aws_lb_target_group.this.target_type == "ip" && aws_lb_target_group.this.port == 8000 && aws_lb_target_group.this.health_check[0].path == "/-/healthz"
    error_message = "Targets must be nodes' addresses at Serve's port, asked for Serve's health."
  }

  assert {
    condition     = aws_lb_listener.this.protocol == "HTTP" && aws_lb_listener.this.port == 80 && output.endpoint_url == "http://samovar-test-0.elb.amazonaws.com"
    error_message = "Without a certificate it must be HTTP at the load balancer's own name."
  }

  assert {
    condition     = [for rule in aws_vpc_security_group_ingress_rule.clients : "${rule.cidr_ipv4}:${rule.to_port}"] == ["10.60.0.0/16:80"]
    error_message = "Only the named networks may come in."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.from_edge.referenced_security_group_id == aws_security_group.this.id && aws_vpc_security_group_ingress_rule.from_edge.to_port == 8000
    error_message = "Nodes must let in the load balancer, at Serve's port."
  }
}

run "https" {
  module { source = "./modules/edge" }
  variables {
    certificate_arn    = "arn:aws:acm:eu-west-1:123456789012:certificate/0"
    domain_name        = "chat.example.com"
    zone_id            = "Z0123456789"
    access_logs_bucket = "logs"
  }

  assert {
    condition     = aws_lb_listener.this.protocol == "HTTPS" && aws_lb_listener.this.port == 443 && strcontains(aws_lb_listener.this.ssl_policy, "TLS13-1-2")
    error_message = "With a certificate it must be HTTPS, TLS 1.2 or newer."
  }

  assert {
    condition     = output.endpoint_url == "https://chat.example.com" && aws_route53_record.this[0].name == "chat.example.com"
    error_message = "Clients must be given the name on the certificate."
  }

  assert {
    condition     = alltrue([for rule in aws_vpc_security_group_ingress_rule.clients : rule.from_port == 443 && rule.to_port == 443])
    error_message = "Nothing but HTTPS may come in."
  }

  assert {
    condition     = aws_lb.this.access_logs[0].bucket == "logs" && aws_lb.this.access_logs[0].enabled
    error_message = "Access logs must go to the given bucket."
  }
}

run "open_to_all" {
  command = plan
  module { source = "./modules/edge" }
  variables { client_cidrs = ["0.0.0.0/0"] }
  expect_failures = [var.client_cidrs]
}

run "no_patience" {
  command = plan
  module { source = "./modules/edge" }
  variables { idle_timeout_s = 5 }
  expect_failures = [var.idle_timeout_s]
}

run "endless_drain" {
  command = plan
  module { source = "./modules/edge" }
  variables { drain_s = 7200 }
  expect_failures = [var.drain_s]
}

run "no_such_port" {
  command = plan
  module { source = "./modules/edge" }
  variables { serve_port = 80000 }
  expect_failures = [var.serve_port]
}
