// A real issuer (npm's oidc-provider) for test_oidc_provider.py: node FILE PORT KEYS.json
// Each client of `clients` gets tokens by its own credentials; what a token says of its tenant is the issuer's word.
import { readFileSync } from "node:fs";
import { Provider } from "oidc-provider";

const [port, keys] = process.argv.slice(2);
const client = (id) => ({
  client_id: id,
  client_secret: `secret-of-${id}-in-a-test`,
  grant_types: ["client_credentials"],
  redirect_uris: [],
  response_types: [],
  token_endpoint_auth_method: "client_secret_post",
});
const SERVERS = {
  "urn:samovar": { audience: "samovar", accessTokenTTL: 300 },
  "urn:short": { audience: "samovar", accessTokenTTL: 1 },
  "urn:other": { audience: "another", accessTokenTTL: 300 },
};
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: ["kitchen", "garden", "chief"].map(client),
  jwks: JSON.parse(readFileSync(keys)),
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: false },
    resourceIndicators: {
      enabled: true,
      getResourceServerInfo: (_, resource) => ({
        ...SERVERS[resource],
        scope: "",
        accessTokenFormat: "jwt",
        jwt: { sign: { alg: "RS256" } },
      }),
    },
  },
  extraTokenClaims: (_, token) =>
    token.clientId === "chief" ? { groups: ["samovar-admins"] } : { tenant: token.clientId },
});
provider.listen(Number(port), "127.0.0.1", () => console.log("ready"));
