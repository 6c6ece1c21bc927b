# The bucket of Terraform's states, made once in an account and kept for good. Its own state is a local file.

provider "aws" {
  region = var.region
}

data "aws_caller_identity" "this" {}

data "aws_partition" "this" {}

locals {
  bucket = coalesce(var.bucket_name, "samovar-state-${data.aws_caller_identity.this.account_id}")
}

resource "aws_kms_key" "state" {
  description             = "Terraform states of Samovar clusters"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = data.aws_iam_policy_document.key.json
}

resource "aws_kms_alias" "state" {
  name          = "alias/${local.bucket}"
  target_key_id = aws_kms_key.state.key_id
}

data "aws_iam_policy_document" "key" {
  #checkov:skip=CKV_AWS_109:a key policy, in which * is this key; the account's IAM policies decide who may use it
  #checkov:skip=CKV_AWS_111:a key policy, in which * is this key
  #checkov:skip=CKV_AWS_356:a key policy, in which * is this key
  statement {
    sid       = "AccountDecidesByIam"
    actions   = ["kms:*"]
    resources = ["*"]
    principals {
      type        = "AWS"
      identifiers = ["arn:${data.aws_partition.this.partition}:iam::${data.aws_caller_identity.this.account_id}:root"]
    }
  }
}

# Terraform refuses to destroy a bucket that holds states.
resource "aws_s3_bucket" "state" {
  #checkov:skip=CKV_AWS_144:versioned; a state can be imported again
  #checkov:skip=CKV_AWS_18:CloudTrail says who changed the states
  #checkov:skip=CKV2_AWS_62:no consumer for events of states
  bucket        = local.bucket
  force_destroy = false
}

resource "aws_s3_bucket_versioning" "state" {
  bucket = aws_s3_bucket.state.id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "state" {
  bucket = aws_s3_bucket.state.id
  rule {
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.state.arn
    }
  }
}

resource "aws_s3_bucket_ownership_controls" "state" {
  bucket = aws_s3_bucket.state.id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "state" {
  bucket                  = aws_s3_bucket.state.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_lifecycle_configuration" "state" {
  bucket     = aws_s3_bucket.state.id
  depends_on = [aws_s3_bucket_versioning.state]

  rule {
    id     = "forget-old-states"
    status = "Enabled"
    filter {}
    noncurrent_version_expiration {
      noncurrent_days = var.old_states_days
    }
    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }
}

data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.state.arn, "${aws_s3_bucket.state.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "state" {
  bucket     = aws_s3_bucket.state.id
  policy     = data.aws_iam_policy_document.bucket.json
  depends_on = [aws_s3_bucket_public_access_block.state]
}
