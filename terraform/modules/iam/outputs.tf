output "head_instance_profile_arn" {
  description = "Instance profile of the head node."
  value       = aws_iam_instance_profile.head.arn
}

output "worker_instance_profile_arn" {
  description = "Instance profile of the workers."
  value       = aws_iam_instance_profile.worker.arn
}

output "head_policy" {
  description = "The head role's policy, JSON."
  value       = data.aws_iam_policy_document.head.json
}

output "worker_policy" {
  description = "The worker role's policy, JSON."
  value       = data.aws_iam_policy_document.worker.json
}
