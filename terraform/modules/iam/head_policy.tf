# What the head may do beside a node's part: Ray's autoscaler, and nothing of EC2 that is not this cluster's.

data "aws_iam_policy_document" "head" {
  source_policy_documents = [data.aws_iam_policy_document.worker.json]

  # Describing knows no resources in EC2.
  statement {
    #checkov:skip=CKV_AWS_356:describing knows no resources
    sid = "SeeInstances"
    actions = [
      "ec2:DescribeInstances",
      "ec2:DescribeInstanceTypes",
      "ec2:DescribeLaunchTemplateVersions",
      "ec2:DescribeSecurityGroups",
      "ec2:DescribeSubnets",
    ]
    resources = ["*"]
  }

  # Split in three, as AWS advises: conditions on an instance would refuse the parts it is made of.
  statement {
    sid       = "LaunchWorkersOfThisCluster"
    actions   = ["ec2:RunInstances"]
    resources = ["${local.ec2}:instance/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/ray-cluster-name"
      values   = [var.cluster_name]
    }
    condition {
      test     = "StringEquals"
      variable = "ec2:InstanceType"
      values   = var.instance_types
    }
    condition {
      test     = "ArnEquals"
      variable = "ec2:InstanceProfile"
      values   = [aws_iam_instance_profile.worker.arn]
    }
  }

  statement {
    sid       = "WithEncryptedDisks"
    actions   = ["ec2:RunInstances"]
    resources = ["${local.ec2}:volume/*"]
    condition {
      test     = "Bool"
      variable = "ec2:Encrypted"
      values   = ["true"]
    }
  }

  statement {
    sid     = "FromThisClustersParts"
    actions = ["ec2:RunInstances"]
    resources = concat(
      var.launch_template_arns,
      var.subnet_arns,
      [
        var.security_group_arn,
        "arn:${var.account.partition}:ec2:${local.region}::image/${var.worker_ami_id}",
        "${local.ec2}:network-interface/*",
        "${local.ec2}:placement-group/${var.cluster_name}-*",
        "${local.ec2}:spot-instances-request/*",
      ],
      var.key_name == null ? [] : ["${local.ec2}:key-pair/${var.key_name}"],
      [for id in var.capacity_reservation_ids : "${local.ec2}:capacity-reservation/${id}"],
    )
  }

  statement {
    sid       = "TagWhatIsLaunched"
    actions   = ["ec2:CreateTags"]
    resources = ["${local.ec2}:instance/*", "${local.ec2}:volume/*"]
    condition {
      test     = "StringEquals"
      variable = "ec2:CreateAction"
      values   = ["RunInstances"]
    }
  }

  statement {
    sid       = "TagAndEndInstancesOfThisCluster"
    actions   = ["ec2:CreateTags", "ec2:TerminateInstances"]
    resources = ["${local.ec2}:instance/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/ray-cluster-name"
      values   = [var.cluster_name]
    }
  }

  statement {
    sid       = "GiveWorkersTheirRole"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.worker.arn]
    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ec2.amazonaws.com"]
    }
  }
}
