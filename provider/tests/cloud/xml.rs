//! The parts of EC2's XML that the proxy writes and pages.

pub(crate) fn error(code: &str) -> String {
    format!(
        "<?xml version=\"1.0\"?><Response><Errors><Error><Code>{code}</Code><Message>as \
         scripted</Message></Error>\
         </Errors><RequestID>1</RequestID></Response>"
    )
}

/// Returns EC2's reply in a default VPC to the revocation of a missing rule.
pub(crate) fn revoked_nothing() -> String {
    "<?xml version=\"1.0\"?><RevokeSecurityGroupIngressResponse \
     xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\">\
     <requestId>1</requestId><return>true</return><unknownIpPermissionSet><item><ipProtocol>tcp</ipProtocol>\
     <fromPort>80</fromPort><toPort>80</toPort><ipRanges><item><cidrIp>0.0.0.0/0</cidrIp></item>\
     </ipRanges></item>\
     </unknownIpPermissionSet></RevokeSecurityGroupIngressResponse>"
        .to_owned()
}

/// Returns EC2's reply to a launch whose token belongs to a terminated instance.
pub(crate) fn launched_and_ended() -> String {
    "<?xml version=\"1.0\"?><RunInstancesResponse \
     xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><instancesSet>\
     <item><instanceId>i-0ended</instanceId><instanceState><code>48</code><name>terminated</name>\
     </instanceState>\
     </item></instancesSet></RunInstancesResponse>"
        .to_owned()
}

/// Returns `size` items of a list from `start` on, and the token of the next page.
pub(crate) fn page(body: &str, list: &str, start: usize, size: usize) -> String {
    let (open, close) = (format!("<{list}>"), format!("</{list}>"));
    let Some((before, rest)) = body.split_once(&open) else { return body.to_owned() };
    let (inside, after) = rest.rsplit_once(&close).expect("a list that ends");
    let items = items(inside);
    let end = items.len().min(start + size);
    let token = if end < items.len() { format!("<nextToken>{end}</nextToken>") } else { String::new() };
    format!("{before}{open}{}{close}{token}{after}", items[start..end].concat())
}

/// Returns the outermost items.
fn items(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut depth, mut start) = (0, 0);
    let tags = text.match_indices('<').filter_map(|(at, _)| {
        let tag = &text[at..];
        if tag.starts_with("<item>") {
            Some((at, 1))
        } else if tag.starts_with("</item>") {
            Some((at, -1))
        } else {
            None
        }
    });
    for (at, step) in tags {
        if depth == 0 {
            start = at;
        }
        depth += step;
        if depth == 0 {
            found.push(text[start..at + "</item>".len()].to_owned());
        }
    }
    found
}

#[test]
fn pages_are_cut_at_whole_items() {
    let body = "<R><l><item>1<x><item>a</item></x></item><item>2</item><item>3</item></l></R>";
    assert_eq!(
        page(body, "l", 0, 2),
        "<R><l><item>1<x><item>a</item></x></item><item>2</item></l><nextToken>2</nextToken></R>"
    );
    assert_eq!(page(body, "l", 2, 2), "<R><l><item>3</item></l></R>");
}
