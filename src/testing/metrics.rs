//! Reading samples out of the text that etcd's `/metrics` serves.

/// One line of the Prometheus text format.
#[derive(Debug, PartialEq)]
pub(super) struct Sample<'a> {
    pub(super) name: &'a str,
    labels: &'a str,
    pub(super) value: f64,
}

impl<'a> Sample<'a> {
    fn parse(line: &'a str) -> Option<Sample<'a>> {
        if line.starts_with('#') {
            return None;
        }
        let (series, value) = line.rsplit_once(' ')?;
        let value = value.parse().ok()?;
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels.strip_suffix('}')?),
            None => (series, ""),
        };
        Some(Sample { name, labels, value })
    }

    /// The value of a label. Values with a comma or a quote in them are not etcd's.
    pub(super) fn label(&self, name: &str) -> Option<&'a str> {
        self.labels.split(',').find_map(|pair| {
            let (key, value) = pair.split_once('=')?;
            (key == name).then(|| value.trim_matches('"'))
        })
    }
}

pub(super) fn samples<'a>(text: &'a str, name: &str) -> impl Iterator<Item = Sample<'a>> {
    text.lines().filter_map(Sample::parse).filter(move |sample| sample.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP calls Calls.\n# TYPE calls counter\n\
        calls{method=\"Put\",type=\"unary\"} 3\ncalls{method=\"Watch\",type=\"stream\"} 1\n\
        calls_other 9\nleader 1\nsize 1.5e+06\n";

    #[test]
    fn samples_are_found_by_name_and_label() {
        let put = samples(TEXT, "calls").find(|s| s.label("method") == Some("Put"));
        let put = put.unwrap();
        assert_eq!((put.value, put.label("type")), (3.0, Some("unary")));
        assert_eq!(put.label("absent"), None);
        assert_eq!(samples(TEXT, "calls").count(), 2);
        assert_eq!(samples(TEXT, "leader").next().unwrap().value, 1.0);
        assert_eq!(samples(TEXT, "size").next().unwrap().value, 1.5e6);
    }
}
