//! TLS options, in our own words, so that a breaking release of the TLS stack is not ours.

/// Certificates and names for `https` endpoints.
///
/// Default: the trust roots that the crate features `tls-native-roots` or `tls-webpki-roots`
/// bring, no client certificate, and the endpoint's host as the name to expect.
#[derive(Clone, Default)]
pub struct TlsOptions {
    ca: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
    domain: Option<String>,
}

impl std::fmt::Debug for TlsOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsOptions")
            .field("ca", &self.ca.is_some())
            .field("identity", &self.identity.is_some())
            .field("domain", &self.domain)
            .finish()
    }
}

impl TlsOptions {
    /// The defaults.
    pub fn new() -> TlsOptions {
        TlsOptions::default()
    }

    /// Trusts this certificate authority, in PEM. Default: none beyond the built-in roots.
    #[must_use]
    pub fn ca_certificate_pem(mut self, pem: impl Into<Vec<u8>>) -> TlsOptions {
        self.ca = Some(pem.into());
        self
    }

    /// Presents this client certificate and key, in PEM. Default: none.
    #[must_use]
    pub fn identity_pem(
        mut self,
        certificate: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> TlsOptions {
        self.identity = Some((certificate.into(), key.into()));
        self
    }

    /// Expects this name in the server's certificate. Default: the host of the endpoint.
    #[must_use]
    pub fn domain_name(mut self, name: impl Into<String>) -> TlsOptions {
        self.domain = Some(name.into());
        self
    }

    pub(crate) fn for_etcd_client(&self) -> etcd_client::TlsOptions {
        let mut options = etcd_client::TlsOptions::new();
        if let Some(pem) = &self.ca {
            options = options.ca_certificate(etcd_client::Certificate::from_pem(pem));
        }
        if let Some((certificate, key)) = &self.identity {
            options = options.identity(etcd_client::Identity::from_pem(certificate, key));
        }
        if let Some(name) = &self.domain {
            options = options.domain_name(name.clone());
        }
        options
    }
}
