# A small tree for the bench's own tests: what it must accept, and the text that errors are planted into.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 6.66"
    }
  }
}

provider "aws" {
  region = "eu-west-1"
  default_tags {
    tags = { project = "samovar" }
  }
}

data "aws_availability_zones" "all" {
  state = "available"
}

data "aws_iam_policy_document" "kv" {
  statement {
    sid       = "ReadKv"
    actions   = ["s3:GetObject"]
    resources = ["${aws_s3_bucket.kv.arn}/kv/*"]
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["true"]
    }
  }
}

ephemeral "aws_secretsmanager_random_password" "token" {
  password_length = 40
}

resource "aws_vpc" "main" {
  cidr_block = "10.0.0.0/16"
  tags       = { Name = "small" }
}

resource "aws_subnet" "each" {
  count             = 2
  vpc_id            = aws_vpc.main.id
  availability_zone = data.aws_availability_zones.all.names[count.index]
  cidr_block        = cidrsubnet(aws_vpc.main.cidr_block, 4, count.index)
}

resource "aws_s3_bucket" "kv" {
  bucket_prefix = "kv-"
}

resource "aws_s3_bucket_lifecycle_configuration" "kv" {
  bucket = aws_s3_bucket.kv.id
  rule {
    id     = "old"
    status = "Enabled"
    filter {
      prefix = "kv/"
    }
    expiration {
      days = 7
    }
  }
}

resource "aws_ssm_parameter" "token" {
  name             = "/small/token"
  type             = "SecureString"
  value_wo         = ephemeral.aws_secretsmanager_random_password.token.random_password
  value_wo_version = 1
}

resource "aws_launch_template" "gpu" {
  name_prefix   = "gpu-"
  instance_type = "g6.xlarge"
  metadata_options {
    http_tokens = "required"
  }
  network_interfaces {
    device_index   = 0
    interface_type = "efa"
    subnet_id      = aws_subnet.each[0].id
  }
}

output "policy" {
  value = data.aws_iam_policy_document.kv.json
}

output "launch_template" {
  value = { id = aws_launch_template.gpu.id, version = aws_launch_template.gpu.latest_version }
}
