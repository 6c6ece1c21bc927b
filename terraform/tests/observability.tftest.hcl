# Logs are encrypted and end; alarms reach those who are named.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  cluster_name     = "samovar-test"
  kms_key_arn      = "arn:aws:kms:eu-west-1:123456789012:key/0"
  log_days         = 7
  kv_bucket_name   = "samovar-test-kv-123456789012"
  edge_metrics     = { load_balancer = "app/samovar-test/0", target_group = "targetgroup/samovar-test/0" }
  alarm_emails     = []
  errors_5min_max  = 10
  first_word_s_max = 10
  kv_bytes_max     = 1000000000000
  monthly_usd_max  = null
}

run "quiet" {
  module { source = "./modules/observability" }

  assert {
    condition     = aws_cloudwatch_log_group.this.kms_key_id == var.kms_key_arn && aws_cloudwatch_log_group.this.retention_in_days == 7
    error_message = "Logs must be encrypted, and end."
  }

  assert {
    condition = toset(keys(aws_cloudwatch_metric_alarm.this)) == toset([
      "server-errors", "edge-errors", "sick-nodes", "no-node", "slow-first-word", "kv-bytes"
    ])
    error_message = "An alarm is missing."
  }

  assert {
    condition     = length(aws_sns_topic.alarms) + length(aws_budgets_budget.this) == 0
    error_message = "Nobody named: no topic and no budget."
  }

  # A load balancer without targets sends no numbers at all.
  assert {
    condition     = aws_cloudwatch_metric_alarm.this["no-node"].treat_missing_data == "breaching"
    error_message = "Silence must count as no node."
  }
}

run "loud" {
  module { source = "./modules/observability" }
  variables {
    alarm_emails    = ["ops@example.com"]
    monthly_usd_max = 500
  }

  assert {
    condition     = aws_sns_topic.alarms[0].kms_master_key_id == var.kms_key_arn && length(aws_sns_topic_subscription.alarms) == 1
    error_message = "The topic must be encrypted and mail to the address."
  }

  assert {
    condition     = alltrue([for alarm in aws_cloudwatch_metric_alarm.this : alarm.alarm_actions == toset([aws_sns_topic.alarms[0].arn])])
    error_message = "Every alarm must go to the topic."
  }

  assert {
    condition     = aws_budgets_budget.this[0].limit_amount == "500.00" && length(aws_budgets_budget.this[0].notification) == 2
    error_message = "The budget must warn of money spent and of money to be spent."
  }
}

run "no_address" {
  command = plan
  module { source = "./modules/observability" }
  variables { alarm_emails = ["ops"] }
  expect_failures = [var.alarm_emails]
}

run "no_money" {
  command = plan
  module { source = "./modules/observability" }
  variables { monthly_usd_max = 0 }
  expect_failures = [var.monthly_usd_max]
}
