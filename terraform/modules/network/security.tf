# Who may talk to whom. No rule of a node says "from anywhere".

resource "aws_security_group" "nodes" {
  #checkov:skip=CKV2_AWS_5:launch templates and Ray's requests name it, which checkov does not follow into other modules
  name                   = "${var.cluster_name}-nodes"
  description            = "Nodes of the Ray cluster ${var.cluster_name}"
  vpc_id                 = aws_vpc.this.id
  revoke_rules_on_delete = true
  tags                   = { Name = "${var.cluster_name}-nodes" }
}

# Ray and NIXL choose ports freely, and EFA passes only where the group names itself for all protocols, both ways.
resource "aws_vpc_security_group_ingress_rule" "nodes_self" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = local.all_traffic
  description                  = "Nodes among themselves"
}

resource "aws_vpc_security_group_egress_rule" "nodes_self" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = local.all_traffic
  description                  = "Nodes among themselves"
}

resource "aws_vpc_security_group_egress_rule" "nodes_s3" {
  security_group_id = aws_security_group.nodes.id
  prefix_list_id    = aws_vpc_endpoint.s3.prefix_list_id
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "S3 through the gateway endpoint"
}

resource "aws_vpc_security_group_egress_rule" "nodes_endpoints" {
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.endpoints.id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  description                  = "Other AWS services through their endpoints"
}

resource "aws_vpc_security_group_egress_rule" "nodes_internet" {
  count = local.has_nat ? 1 : 0

  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "HTTPS through NAT: images, packages, models"
}

resource "aws_vpc_security_group_ingress_rule" "nodes_ssh" {
  for_each = var.ssh_cidrs

  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = each.key
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
  description       = "SSH for ray up, from a private network"
}

resource "aws_security_group" "endpoints" {
  name                   = "${var.cluster_name}-endpoints"
  description            = "Endpoints of AWS services for ${var.cluster_name}"
  vpc_id                 = aws_vpc.this.id
  revoke_rules_on_delete = true
  tags                   = { Name = "${var.cluster_name}-endpoints" }
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  security_group_id            = aws_security_group.endpoints.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  description                  = "HTTPS from nodes"
}
