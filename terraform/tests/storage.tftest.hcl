# The bucket of KV blocks: closed, encrypted, and cleaned by itself.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  cluster_name   = "samovar-test"
  account        = { id = "123456789012", partition = "aws", region = "eu-west-1" }
  kv_prefix      = "kv"
  kv_expire_days = 3
  force_destroy  = false
  s3_endpoint_id = "vpce-0123456789abcdef0"
}

run "bucket" {
  module { source = "./modules/storage" }

  assert {
    condition     = aws_s3_bucket.kv.bucket == "samovar-test-kv-123456789012" && !aws_s3_bucket.kv.force_destroy
    error_message = "The bucket must have the account in its name, and keep its blocks."
  }

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.kv.block_public_acls, aws_s3_bucket_public_access_block.kv.block_public_policy,
      aws_s3_bucket_public_access_block.kv.ignore_public_acls, aws_s3_bucket_public_access_block.kv.restrict_public_buckets,
    ])
    error_message = "No public access of any kind."
  }

  assert {
    condition = alltrue([
      for rule in aws_s3_bucket_server_side_encryption_configuration.kv.rule : rule.bucket_key_enabled &&
      rule.apply_server_side_encryption_by_default[0].sse_algorithm == "aws:kms" &&
      rule.apply_server_side_encryption_by_default[0].kms_master_key_id == aws_kms_key.this.arn
    ])
    error_message = "Blocks must be encrypted with our key, through a bucket key."
  }

  assert {
    condition     = aws_kms_key.this.enable_key_rotation
    error_message = "The key must be rotated."
  }

  assert {
    condition = anytrue([
      for rule in aws_s3_bucket_lifecycle_configuration.kv.rule :
      rule.filter[0].prefix == "kv/" && try(rule.expiration[0].days, 0) == 3
      ]) && anytrue([
      for rule in aws_s3_bucket_lifecycle_configuration.kv.rule :
      try(rule.abort_incomplete_multipart_upload[0].days_after_initiation, 0) == 1
    ])
    error_message = "Blocks must expire, and uploads that were never finished."
  }

  assert {
    condition     = alltrue([for statement in data.aws_iam_policy_document.bucket.statement : statement.effect == "Deny"])
    error_message = "The bucket's policy may only deny."
  }

  assert {
    condition = anytrue([
      for statement in data.aws_iam_policy_document.bucket.statement : length(statement.resources) == 2 && contains(statement.actions, "s3:*") && anytrue([
        for condition in statement.condition : condition.variable == "aws:SecureTransport" && contains(condition.values, "false")
      ])
    ])
    error_message = "Requests without TLS must be denied, for the bucket and all objects."
  }

  assert {
    condition = anytrue([
      for statement in data.aws_iam_policy_document.bucket.statement : toset(statement.actions) == toset(["s3:GetObject", "s3:PutObject"]) && anytrue([
        for condition in statement.condition : condition.test == "StringNotEquals" && condition.variable == "aws:SourceVpce" && contains(condition.values, "vpce-0123456789abcdef0")
      ])
    ])
    error_message = "Blocks must be read and written through the VPC's endpoint only."
  }
}

run "prefix_with_a_slash_behind" {
  command = plan
  module { source = "./modules/storage" }
  variables { kv_prefix = "kv/" }
  expect_failures = [var.kv_prefix]
}

run "never_expires" {
  command = plan
  module { source = "./modules/storage" }
  variables { kv_expire_days = 0 }
  expect_failures = [var.kv_expire_days]
}
