"""What people write: look at a group, then add each port that is missing, and take away each that is too much.

Usage: per_port.py GROUPS PORT...   (names: bench-0 ...)"""

import sys

import boto3

count, ports = int(sys.argv[1]), {int(port) for port in sys.argv[2:]}
ec2 = boto3.client("ec2")
vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]


def permission(port):
    return {"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}


def look(name):
    filters = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc]}]
    found = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
    return found[0] if found else None


for number in range(count):
    name = f"bench-{number}"
    for port in sorted(ports):
        group = look(name)
        if port not in {rule.get("FromPort") for rule in group["IpPermissions"]}:
            ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[permission(port)])
    group = look(name)
    for port in sorted({rule.get("FromPort") for rule in group["IpPermissions"]} - ports):
        ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[permission(port)])
