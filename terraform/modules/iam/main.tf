# Who may do what: the head grows and shrinks the cluster, workers move KV blocks, and neither can do more.
#
# What Ray calls was read in ray/autoscaler/_private/aws of Ray 2.60. No AWS-managed policy is attached:
# AmazonSSMManagedInstanceCore, the usual one for Session Manager, reads every SSM parameter of the account.

locals {
  region    = var.account.region
  ec2       = "arn:${var.account.partition}:ec2:${local.region}:${var.account.id}"
  parameter = "arn:${var.account.partition}:ssm:${local.region}:${var.account.id}:parameter${var.ssm_prefix}"
  nodes     = { head = aws_iam_role.head.name, worker = aws_iam_role.worker.name }
  extra = merge([
    for role, name in local.nodes : { for arn in var.extra_policy_arns : "${role} ${arn}" => { role = name, arn = arn } }
  ]...)
}

data "aws_iam_policy_document" "trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "head" {
  name               = "${var.cluster_name}-head"
  description        = "Head node of the Ray cluster ${var.cluster_name}"
  assume_role_policy = data.aws_iam_policy_document.trust.json
}

resource "aws_iam_role" "worker" {
  name               = "${var.cluster_name}-worker"
  description        = "Workers of the Ray cluster ${var.cluster_name}"
  assume_role_policy = data.aws_iam_policy_document.trust.json
}

resource "aws_iam_instance_profile" "head" {
  name = aws_iam_role.head.name
  role = aws_iam_role.head.name
}

resource "aws_iam_instance_profile" "worker" {
  name = aws_iam_role.worker.name
  role = aws_iam_role.worker.name
}

resource "aws_iam_role_policy" "head" {
  name   = "samovar-head"
  role   = aws_iam_role.head.id
  policy = data.aws_iam_policy_document.head.json
}

resource "aws_iam_role_policy" "worker" {
  name   = "samovar-worker"
  role   = aws_iam_role.worker.id
  policy = data.aws_iam_policy_document.worker.json
}

resource "aws_iam_role_policy_attachment" "extra" {
  for_each = local.extra

  role       = each.value.role
  policy_arn = each.value.arn
}

# Launching spot instances needs this role once in an account. Where it exists already, leave it alone.
resource "aws_iam_service_linked_role" "spot" {
  count = var.create_spot_role ? 1 : 0

  aws_service_name = "spot.amazonaws.com"
}
