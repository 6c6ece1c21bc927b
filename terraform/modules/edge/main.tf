# One address for clients: a load balancer inside the VPC, in front of Serve's proxies on all nodes.
#
# It does not know sessions: the proxies behind it send a user to the right replica.

locals {
  has_tls = var.certificate_arn != null
  port    = local.has_tls ? 443 : 80
  host    = coalesce(var.domain_name, aws_lb.this.dns_name)
}

resource "aws_lb" "this" {
  #checkov:skip=CKV_AWS_91:access logs go to access_logs_bucket, which is yours to give
  #checkov:skip=CKV_AWS_150:deletion_protection is a variable, on in envs/prod.tfvars
  #checkov:skip=CKV2_AWS_28:internal, no web application firewall
  name                       = var.cluster_name
  internal                   = true
  load_balancer_type         = "application"
  security_groups            = [aws_security_group.this.id]
  subnets                    = var.subnet_ids
  idle_timeout               = var.idle_timeout_s
  drop_invalid_header_fields = true
  desync_mitigation_mode     = "defensive"
  enable_deletion_protection = var.deletion_protection

  dynamic "access_logs" {
    for_each = var.access_logs_bucket == null ? [] : [var.access_logs_bucket]
    content {
      bucket  = access_logs.value
      prefix  = var.cluster_name
      enabled = true
    }
  }
}

# Nodes register themselves by address. A busy node gets fewer new requests: answers differ much in length.
resource "aws_lb_target_group" "this" {
  #checkov:skip=CKV_AWS_378:inside the VPC, and only from the load balancer's security group
  name                          = var.cluster_name
  vpc_id                        = var.vpc_id
  target_type                   = "ip"
  port                          = var.serve_port
  protocol                      = "HTTP"
  load_balancing_algorithm_type = "least_outstanding_requests"
  deregistration_delay          = var.drain_s

  health_check {
    path                = "/-/healthz"
    port                = "traffic-port"
    protocol            = "HTTP"
    matcher             = "200"
    interval            = 10
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 3
  }
}

resource "aws_lb_listener" "this" {
  #checkov:skip=CKV_AWS_2:HTTP only where no certificate was given
  #checkov:skip=CKV_AWS_103:TLS 1.2 at least wherever there is a certificate
  load_balancer_arn = aws_lb.this.arn
  port              = local.port
  protocol          = local.has_tls ? "HTTPS" : "HTTP"
  certificate_arn   = var.certificate_arn
  ssl_policy        = local.has_tls ? "ELBSecurityPolicy-TLS13-1-2-2021-06" : null

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.this.arn
  }
}

resource "aws_route53_record" "this" {
  count = var.zone_id == null ? 0 : 1

  zone_id = var.zone_id
  name    = var.domain_name
  type    = "A"

  alias {
    name                   = aws_lb.this.dns_name
    zone_id                = aws_lb.this.zone_id
    evaluate_target_health = false
  }
}

resource "aws_security_group" "this" {
  name                   = "${var.cluster_name}-edge"
  description            = "Load balancer of ${var.cluster_name}"
  vpc_id                 = var.vpc_id
  revoke_rules_on_delete = true
  tags                   = { Name = "${var.cluster_name}-edge" }
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each = var.client_cidrs

  security_group_id = aws_security_group.this.id
  cidr_ipv4         = each.key
  ip_protocol       = "tcp"
  from_port         = local.port
  to_port           = local.port
  description       = "Clients"
}

resource "aws_vpc_security_group_egress_rule" "nodes" {
  security_group_id            = aws_security_group.this.id
  referenced_security_group_id = var.node_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = var.serve_port
  to_port                      = var.serve_port
  description                  = "Serve's proxies"
}

resource "aws_vpc_security_group_ingress_rule" "from_edge" {
  security_group_id            = var.node_security_group_id
  referenced_security_group_id = aws_security_group.this.id
  ip_protocol                  = "tcp"
  from_port                    = var.serve_port
  to_port                      = var.serve_port
  description                  = "Serve's proxy, from the load balancer"
}
