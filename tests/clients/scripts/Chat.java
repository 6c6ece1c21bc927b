import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.util.Iterator;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/** A streamed chat by the JDK's own client, which trusts one authority: java Chat.java URL CA MODEL. */
class Chat {
    public static void main(String[] args) throws Exception {
        KeyStore trusted = KeyStore.getInstance(KeyStore.getDefaultType());
        trusted.load(null, null);
        try (var file = Files.newInputStream(Path.of(args[1]))) {
            Certificate authority = CertificateFactory.getInstance("X.509").generateCertificate(file);
            trusted.setCertificateEntry("authority", authority);
        }
        TrustManagerFactory managers = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        managers.init(trusted);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, managers.getTrustManagers(), null);

        String body = "{\"model\": \"" + args[2] + "\", \"stream\": true, \"max_tokens\": 8, \"temperature\": 0,"
                + " \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}";
        HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/v1/chat/completions"))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
        HttpClient client = HttpClient.newBuilder().sslContext(context).build();
        HttpResponse<java.util.stream.Stream<String>> answer =
                client.send(request, HttpResponse.BodyHandlers.ofLines());
        System.out.println(answer.statusCode() + " " + answer.version() + " "
                + answer.sslSession().map(session -> session.getProtocol()).orElse("plain"));
        for (Iterator<String> lines = answer.body().iterator(); lines.hasNext(); ) {
            String line = lines.next();
            if (!line.isEmpty()) {
                System.out.println(line);
            }
        }
    }
}
