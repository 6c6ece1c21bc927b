# The log group, and alarms on what a user or the bill notices. Ray's and Samovar's own metrics are Prometheus':
# every node serves them.

locals {
  edge = { LoadBalancer = var.edge_metrics.load_balancer }
  pool = merge(local.edge, { TargetGroup = var.edge_metrics.target_group })
  elb  = "AWS/ApplicationELB"

  alarms = {
    server-errors = {
      description = "Replicas or proxies answer 5xx"
      namespace   = local.elb, metric = "HTTPCode_Target_5XX_Count", dimensions = local.pool
      statistic   = "Sum", percentile = null, above = true, limit = var.errors_5min_max
      period_s    = 300, periods = 1, missing = "notBreaching"
    }
    edge-errors = {
      description = "The load balancer itself answers 5xx: no node is there, or none answers in time"
      namespace   = local.elb, metric = "HTTPCode_ELB_5XX_Count", dimensions = local.edge
      statistic   = "Sum", percentile = null, above = true, limit = var.errors_5min_max
      period_s    = 300, periods = 1, missing = "notBreaching"
    }
    sick-nodes = {
      description = "A node is registered with the load balancer and does not answer: unhealthy, or lost without deregistering"
      namespace   = local.elb, metric = "UnHealthyHostCount", dimensions = local.pool
      statistic   = "Maximum", percentile = null, above = true, limit = 0
      period_s    = 300, periods = 3, missing = "notBreaching"
    }
    no-node = {
      description = "No node answers"
      namespace   = local.elb, metric = "HealthyHostCount", dimensions = local.pool
      statistic   = "Minimum", percentile = null, above = false, limit = 1
      period_s    = 60, periods = 5, missing = "breaching"
    }
    slow-first-word = {
      description = "Time to the first bytes of an answer, the slowest tenth"
      namespace   = local.elb, metric = "TargetResponseTime", dimensions = local.pool
      statistic   = null, percentile = "p90", above = true, limit = var.first_word_s_max
      period_s    = 300, periods = 3, missing = "notBreaching"
    }
    kv-bytes = {
      description = "KV blocks in S3 (counted once a day): is the lifecycle rule at work?"
      namespace   = "AWS/S3", metric = "BucketSizeBytes"
      dimensions  = { BucketName = var.kv_bucket_name, StorageType = "StandardStorage" }
      statistic   = "Average", percentile = null, above = true, limit = var.kv_bytes_max
      period_s    = 86400, periods = 1, missing = "notBreaching"
    }
  }
}

resource "aws_cloudwatch_log_group" "this" {
  #checkov:skip=CKV_AWS_338:how long logs stay is log_days
  name              = "/samovar/${var.cluster_name}"
  kms_key_id        = var.kms_key_arn
  retention_in_days = var.log_days
}

resource "aws_sns_topic" "alarms" {
  count = length(var.alarm_emails) > 0 ? 1 : 0

  name              = "${var.cluster_name}-alarms"
  kms_master_key_id = var.kms_key_arn
}

resource "aws_sns_topic_subscription" "alarms" {
  for_each = var.alarm_emails

  topic_arn = aws_sns_topic.alarms[0].arn
  protocol  = "email"
  endpoint  = each.key
}

resource "aws_cloudwatch_metric_alarm" "this" {
  for_each = local.alarms

  alarm_name          = "${var.cluster_name}-${each.key}"
  alarm_description   = each.value.description
  namespace           = each.value.namespace
  metric_name         = each.value.metric
  dimensions          = each.value.dimensions
  statistic           = each.value.statistic
  extended_statistic  = each.value.percentile
  comparison_operator = each.value.above ? "GreaterThanThreshold" : "LessThanThreshold"
  threshold           = each.value.limit
  period              = each.value.period_s
  evaluation_periods  = each.value.periods
  treat_missing_data  = each.value.missing
  alarm_actions       = aws_sns_topic.alarms[*].arn
  ok_actions          = aws_sns_topic.alarms[*].arn
}

resource "aws_budgets_budget" "this" {
  count = var.monthly_usd_max == null ? 0 : 1

  name         = var.cluster_name
  budget_type  = "COST"
  time_unit    = "MONTHLY"
  limit_amount = format("%.2f", var.monthly_usd_max)
  limit_unit   = "USD"

  # Counts only once the tag is switched on as a cost allocation tag, in Billing.
  cost_filter {
    name   = "TagKeyValue"
    values = [format("user:samovar-cluster$%s", var.cluster_name)]
  }

  dynamic "notification" {
    for_each = length(var.alarm_emails) > 0 ? { ACTUAL = 80, FORECASTED = 100 } : {}
    content {
      notification_type          = notification.key
      comparison_operator        = "GREATER_THAN"
      threshold                  = notification.value
      threshold_type             = "PERCENTAGE"
      subscriber_email_addresses = var.alarm_emails
    }
  }
}
