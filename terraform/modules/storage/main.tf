# The bucket of KV blocks and the key that encrypts it, the logs and the SSM parameters.
#
# KV blocks can be computed again: nothing here is versioned, copied elsewhere or backed up.

locals {
  bucket = coalesce(var.bucket_name, "${var.cluster_name}-kv-${var.account.id}")
  logs   = "arn:${var.account.partition}:logs:${var.account.region}:${var.account.id}:log-group:/samovar/${var.cluster_name}"
}

resource "aws_kms_key" "this" {
  description             = "Samovar cluster ${var.cluster_name}: KV blocks, logs, SSM parameters"
  enable_key_rotation     = true
  deletion_window_in_days = 7
  policy                  = data.aws_iam_policy_document.key.json
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.cluster_name}"
  target_key_id = aws_kms_key.this.key_id
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
      identifiers = ["arn:${var.account.partition}:iam::${var.account.id}:root"]
    }
  }

  statement {
    sid       = "LogsOfThisCluster"
    actions   = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
    resources = ["*"]
    principals {
      type        = "Service"
      identifiers = ["logs.${var.account.region}.amazonaws.com"]
    }
    condition {
      test     = "ArnLike"
      variable = "kms:EncryptionContext:aws:logs:arn"
      values   = [local.logs, "${local.logs}/*"]
    }
  }

  statement {
    sid       = "AlarmsToTheTopic"
    actions   = ["kms:Decrypt", "kms:GenerateDataKey*"]
    resources = ["*"]
    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [var.account.id]
    }
  }
}

resource "aws_s3_bucket" "kv" {
  #checkov:skip=CKV_AWS_144:a cache: what is lost is computed again
  #checkov:skip=CKV_AWS_21:a cache: an old version of a block is never read
  #checkov:skip=CKV_AWS_18:a line per block read would cost more than the block; CloudTrail data events can be switched on
  #checkov:skip=CKV2_AWS_62:no consumer for events of a cache
  bucket        = local.bucket
  force_destroy = var.force_destroy
}

resource "aws_s3_bucket_ownership_controls" "kv" {
  bucket = aws_s3_bucket.kv.id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "kv" {
  bucket                  = aws_s3_bucket.kv.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

# Without the bucket key each block costs a call of KMS.
resource "aws_s3_bucket_server_side_encryption_configuration" "kv" {
  bucket = aws_s3_bucket.kv.id
  rule {
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this.arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "kv" {
  bucket = aws_s3_bucket.kv.id

  rule {
    id     = "expire-kv"
    status = "Enabled"
    filter {
      prefix = "${var.kv_prefix}/"
    }
    expiration {
      days = var.kv_expire_days
    }
  }

  rule {
    id     = "abort-uploads"
    status = "Enabled"
    filter {}
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
    resources = [aws_s3_bucket.kv.arn, "${aws_s3_bucket.kv.arn}/*"]
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

  statement {
    sid       = "Tls12OrNewer"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.kv.arn, "${aws_s3_bucket.kv.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "NumericLessThan"
      variable = "s3:TlsVersion"
      values   = ["1.2"]
    }
  }

  # KV blocks are the users' words. Even an administrator's laptop reads none of them; deleting stays possible.
  statement {
    sid       = "BlocksOnlyInsideTheVpc"
    effect    = "Deny"
    actions   = ["s3:GetObject", "s3:PutObject"]
    resources = ["${aws_s3_bucket.kv.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "StringNotEquals"
      variable = "aws:SourceVpce"
      values   = [var.s3_endpoint_id]
    }
  }
}

resource "aws_s3_bucket_policy" "kv" {
  bucket     = aws_s3_bucket.kv.id
  policy     = data.aws_iam_policy_document.bucket.json
  depends_on = [aws_s3_bucket_public_access_block.kv]
}
