# The bucket of states: kept, versioned, encrypted, closed.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  region = "eu-west-1"
}

run "state_bucket" {
  module { source = "./bootstrap" }

  assert {
    condition     = output.state_bucket != "" && aws_s3_bucket.state.bucket == "samovar-state-123456789012" && !aws_s3_bucket.state.force_destroy
    error_message = "The bucket must have the account in its name, and never be emptied."
  }

  assert {
    condition     = aws_s3_bucket_versioning.state.versioning_configuration[0].status == "Enabled"
    error_message = "Earlier states must be kept."
  }

  assert {
    condition     = alltrue([for rule in aws_s3_bucket_server_side_encryption_configuration.state.rule : rule.apply_server_side_encryption_by_default[0].kms_master_key_id == aws_kms_key.state.arn])
    error_message = "States must be encrypted with our key."
  }

  assert {
    condition     = aws_s3_bucket_public_access_block.state.restrict_public_buckets && aws_s3_bucket_public_access_block.state.block_public_policy
    error_message = "No public access of any kind."
  }
}

run "forgetful" {
  command = plan
  module { source = "./bootstrap" }
  variables { old_states_days = 1 }
  expect_failures = [var.old_states_days]
}
