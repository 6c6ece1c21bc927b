# What every node may do, head and worker alike; all that a worker may do.

data "aws_iam_policy_document" "worker" {
  statement {
    sid       = "ListKvBlocks"
    actions   = ["s3:ListBucket"]
    resources = [var.kv_bucket_arn]
    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["${var.kv_prefix}/*"]
    }
  }

  statement {
    sid = "MoveKvBlocks"
    actions = [
      "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"
    ]
    resources = ["${var.kv_bucket_arn}/${var.kv_prefix}/*"]
  }

  statement {
    sid       = "UseTheKeyThroughS3AndSsm"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
    resources = [var.kms_key_arn]
    condition {
      test     = "StringEquals"
      variable = "kms:ViaService"
      values   = ["s3.${local.region}.amazonaws.com", "ssm.${local.region}.amazonaws.com"]
    }
  }

  statement {
    sid       = "ReadTokenAndSecrets"
    actions   = ["ssm:GetParameter", "ssm:GetParameters"]
    resources = ["${local.parameter}/*"]
  }

  statement {
    sid       = "WriteLogs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = ["${var.log_group_arn}:*"]
  }

  statement {
    sid       = "JoinAndLeaveTheLoadBalancer"
    actions   = ["elasticloadbalancing:RegisterTargets", "elasticloadbalancing:DeregisterTargets"]
    resources = [var.target_group_arn]
  }

  # The least that Session Manager needs. These actions know no resources.
  statement {
    #checkov:skip=CKV_AWS_111:these actions know no resources
    #checkov:skip=CKV_AWS_356:these actions know no resources
    sid = "SessionManager"
    actions = [
      "ssm:UpdateInstanceInformation",
      "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
    ]
    resources = ["*"]
  }

  dynamic "statement" {
    for_each = length(var.ecr_repository_arns) > 0 ? [1] : []
    content {
      sid       = "PullImages"
      actions   = ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer", "ecr:BatchCheckLayerAvailability"]
      resources = var.ecr_repository_arns
    }
  }

  dynamic "statement" {
    for_each = length(var.ecr_repository_arns) > 0 ? [1] : []
    content {
      sid       = "LogInToRegistry"
      actions   = ["ecr:GetAuthorizationToken"]
      resources = ["*"]
    }
  }
}
