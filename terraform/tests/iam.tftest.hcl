# The two roles. What the policies allow and refuse is shown by tests/infra/test_iam.py, on a running IAM.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  cluster_name             = "samovar-test"
  account                  = { id = "123456789012", partition = "aws", region = "eu-west-1" }
  kv_bucket_arn            = "arn:aws:s3:::samovar-test-kv-123456789012"
  kv_prefix                = "kv"
  kms_key_arn              = "arn:aws:kms:eu-west-1:123456789012:key/0"
  ssm_prefix               = "/samovar/samovar-test"
  log_group_arn            = "arn:aws:logs:eu-west-1:123456789012:log-group:/samovar/samovar-test"
  target_group_arn         = "arn:aws:elasticloadbalancing:eu-west-1:123456789012:targetgroup/samovar-test/0"
  launch_template_arns     = ["arn:aws:ec2:eu-west-1:123456789012:launch-template/lt-0123456789abcdef0"]
  instance_types           = ["g6.xlarge"]
  worker_ami_id            = "ami-0123456789abcdef0"
  subnet_arns              = ["arn:aws:ec2:eu-west-1:123456789012:subnet/subnet-0123456789abcdef0"]
  security_group_arn       = "arn:aws:ec2:eu-west-1:123456789012:security-group/sg-0123456789abcdef0"
  key_name                 = null
  capacity_reservation_ids = []
  ecr_repository_arns      = []
  extra_policy_arns        = []
  create_spot_role         = false
}

run "roles" {
  module { source = "./modules/iam" }

  assert {
    condition = length([
      for action in flatten([for statement in data.aws_iam_policy_document.worker.statement : statement.actions]) :
      action if startswith(action, "ec2:") || startswith(action, "iam:") || strcontains(action, "*")
    ]) == 0
    error_message = "A worker must have nothing of EC2 and IAM, and no wildcard."
  }

  assert {
    condition = [
      for statement in data.aws_iam_policy_document.worker.statement :
      join(" ", statement.resources) if contains(statement.actions, "s3:PutObject")
    ] == ["${var.kv_bucket_arn}/kv/*"]
    error_message = "A worker must write below the prefix only."
  }

  assert {
    condition = [
      for statement in data.aws_iam_policy_document.worker.statement :
      join(" ", statement.resources) if contains(statement.actions, "ssm:GetParameter")
    ] == ["arn:aws:ssm:eu-west-1:123456789012:parameter/samovar/samovar-test/*"]
    error_message = "A worker must read this cluster's parameters only."
  }

  # Any resource at all: only for actions that know none.
  assert {
    condition = [
      for statement in data.aws_iam_policy_document.worker.statement : statement.sid if contains(statement.resources, "*")
    ] == ["SessionManager"]
    error_message = "Only Session Manager's actions, which know no resources, may be allowed on *."
  }

  assert {
    condition = toset([
      for action in flatten([for statement in data.aws_iam_policy_document.head.statement : statement.actions]) : action
      ]) == toset([
      "ec2:RunInstances", "ec2:CreateTags", "ec2:TerminateInstances", "ec2:DescribeInstances", "ec2:DescribeInstanceTypes",
      "ec2:DescribeLaunchTemplateVersions", "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "iam:PassRole",
    ])
    error_message = "The head must have exactly what Ray's autoscaler calls, beside a node's part."
  }

  assert {
    condition = alltrue([
      for statement in data.aws_iam_policy_document.head.statement : anytrue([
        for condition in statement.condition : condition.variable == "aws:ResourceTag/ray-cluster-name" && contains(condition.values, "samovar-test")
      ]) if contains(statement.actions, "ec2:TerminateInstances")
    ])
    error_message = "The head must end instances of its own cluster only."
  }

  assert {
    condition = alltrue([
      for statement in data.aws_iam_policy_document.head.statement :
      statement.resources == toset([aws_iam_role.worker.arn]) if contains(statement.actions, "iam:PassRole")
    ])
    error_message = "The head must pass the worker's role and no other."
  }

  assert {
    condition = anytrue([
      for statement in data.aws_iam_policy_document.head.statement : length(statement.condition) == 3 && alltrue([
        for resource in statement.resources : endswith(resource, ":instance/*")
      ]) if contains(statement.actions, "ec2:RunInstances")
    ])
    error_message = "Launching must be bound to the cluster's tag, the pools' types and the worker's profile."
  }

  assert {
    condition = length([
      for resource in flatten([for statement in data.aws_iam_policy_document.head.statement : statement.resources]) :
      resource if strcontains(resource, ":key-pair/")
    ]) == 0
    error_message = "Without a key pair none may be used."
  }
}

run "options" {
  module { source = "./modules/iam" }
  variables {
    key_name                 = "ops"
    capacity_reservation_ids = ["cr-0123456789abcdef0"]
    ecr_repository_arns      = ["arn:aws:ecr:eu-west-1:123456789012:repository/samovar"]
    extra_policy_arns        = ["arn:aws:iam::123456789012:policy/models"]
    create_spot_role         = true
  }

  assert {
    condition = length([
      for resource in flatten([for statement in data.aws_iam_policy_document.head.statement : statement.resources]) :
      resource if endswith(resource, ":key-pair/ops") || endswith(resource, ":capacity-reservation/cr-0123456789abcdef0")
    ]) == 2
    error_message = "The given key pair and reservation must be usable."
  }

  assert {
    condition     = length(aws_iam_role_policy_attachment.extra) == 2 && length(aws_iam_service_linked_role.spot) == 1
    error_message = "Both roles must have the extra policy, and the account its role for spot."
  }

  assert {
    condition = contains(flatten([
      for statement in data.aws_iam_policy_document.worker.statement : tolist(statement.actions)
    ]), "ecr:BatchGetImage")
    error_message = "Nodes must be able to pull from the given repository."
  }
}

run "prefix_without_a_slash" {
  command = plan
  module { source = "./modules/iam" }
  variables { ssm_prefix = "samovar" }
  expect_failures = [var.ssm_prefix]
}
