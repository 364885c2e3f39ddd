"""Hosts on which strangers have a place of their own: to allow one is to allow every customer's part of it.

Rule 1: these are data. A host stands here when somebody without a contract can write to it, or publish on it, and read
        the result elsewhere: gists, raw files, paste and webhook catchers, office documents and forms, forge and chat
        APIs, automation hooks, model vendors (a file uploaded with the attacker's own key).
Rule 2: without path rules such a host is a warning at each start, an error under `strict = true`.
Rule 3: a leading dot stands for everything below, and a wildcard over it is an error (`multi_tenant_suffix`).
The private section of the Public Suffix List is asked beside this table.
"""

from __future__ import annotations

import re
from typing import Final

TENANTS: Final[dict[str, str]] = {
    "source forges": """
        github.com api.github.com gist.github.com raw.githubusercontent.com gist.githubusercontent.com
        objects.githubusercontent.com user-images.githubusercontent.com camo.githubusercontent.com uploads.github.com
        codeload.github.com .githubusercontent.com gitlab.com bitbucket.org api.bitbucket.org codeberg.org gitea.com
        git.sr.ht sr.ht dev.azure.com gitee.com sourceforge.net .visualstudio.com
    """,
    "paste and file drops": """
        pastebin.com paste.ee dpaste.com dpaste.org hastebin.com toptal.com paste.rs termbin.com ix.io sprunge.us
        0x0.st transfer.sh file.io temp.sh bashupload.com gofile.io api.gofile.io catbox.moe litterbox.catbox.moe
        files.catbox.moe tmpfiles.org filebin.net wetransfer.com mega.nz anonfiles.com rentry.co rentry.org
        privatebin.net ghostbin.com controlc.com justpaste.it jsonblob.com jsonbin.io api.jsonbin.io extendsclass.com
        controlc.com cl1p.net pixeldrain.com uguu.se imgur.com api.imgur.com i.imgur.com imgbb.com api.imgbb.com
        telegra.ph textbin.net snippet.host clbin.com
    """,
    "webhook and request catchers": """
        webhook.site .webhook.site requestbin.com .requestbin.com requestbin.net .requestbin.net pipedream.net
        .pipedream.net .m.pipedream.net requestcatcher.com .requestcatcher.com beeceptor.com .beeceptor.com
        hookbin.com hookdeck.com hkdk.events postb.in ptsv2.com ptsv3.com mockbin.org mockbin.io httpbin.org
        httpbingo.org postman-echo.com .interact.sh .oast.fun .oast.pro .oast.live .oast.site .oast.online .oast.me
        .burpcollaborator.net .oastify.com .canarytokens.com canarytokens.com .dnslog.cn .ceye.io .bxss.me .ngrok.io
        .ngrok.app .ngrok.dev .ngrok-free.app .ngrok-free.dev .trycloudflare.com .loca.lt .serveo.net .localhost.run
        .lhr.life .localtunnel.me .bore.pub smee.io ntfy.sh webhookrelay.com .webrelay.io .pinggy.link .tunnelmole.net
        .devtunnels.ms .zrok.io
    """,
    "office documents and forms": """
        docs.google.com forms.google.com drive.google.com sheets.google.com sheets.googleapis.com docs.googleapis.com
        slides.googleapis.com www.googleapis.com content.googleapis.com forms.gle script.google.com
        script.googleusercontent.com .googleusercontent.com sites.google.com calendar.google.com
        firestore.googleapis.com firebasestorage.googleapis.com .firebaseio.com storage.googleapis.com
        storage.cloud.google.com forms.office.com forms.microsoft.com graph.microsoft.com onedrive.live.com
        api.onedrive.com .sharepoint.com api.airtable.com airtable.com api.notion.com www.notion.so notion.so
        .notion.site typeform.com api.typeform.com .typeform.com surveymonkey.com jotform.com api.jotform.com
        form.jotform.com formspree.io formsubmit.co getform.io docs.zoho.com forms.zohopublic.com coda.io
        api.dropboxapi.com content.dropboxapi.com www.dropbox.com dl.dropboxusercontent.com .dropboxusercontent.com
        api.box.com upload.box.com app.box.com trello.com api.trello.com miro.com figma.com api.figma.com
        etherpad.wikimedia.org hackmd.io app.smartsheet.com tally.so api.tally.so
    """,
    "chat and mail": """
        hooks.slack.com slack.com files.slack.com api.slack.com .slack.com discord.com discordapp.com
        cdn.discordapp.com media.discordapp.net api.telegram.org web.telegram.org t.me graph.facebook.com
        api.twitter.com api.x.com outlook.office.com outlook.office365.com .webhook.office.com chat.googleapis.com
        gmail.googleapis.com mail.google.com smtp.gmail.com api.sendgrid.com api.mailgun.net api.postmarkapp.com
        api.resend.com api.twilio.com api.pushover.net api.pushbullet.com matrix.org matrix-client.matrix.org
        www.reddit.com oauth.reddit.com mastodon.social api.linkedin.com hooks.teams.microsoft.com zoom.us api.zoom.us
    """,
    "automation hooks": """
        hooks.zapier.com zapier.com maker.ifttt.com ifttt.com hook.us1.make.com hook.us2.make.com hook.eu1.make.com
        hook.eu2.make.com .make.com hook.integromat.com .integromat.com n8n.cloud .n8n.cloud .app.n8n.cloud
        api.pipedream.com connect.pabbly.com .logic.azure.com .azure-api.net hooks.airtable.com .workato.com
        api.retool.com hook.eu1.make.celonis.com windmill.dev app.windmill.dev
    """,
    "storage and functions": """
        s3.amazonaws.com .amazonaws.com .cloudfront.net .blob.core.windows.net .file.core.windows.net
        .web.core.windows.net .table.core.windows.net .queue.core.windows.net .azurewebsites.net .azureedge.net
        .azurefd.net .digitaloceanspaces.com .r2.cloudflarestorage.com .r2.dev .workers.dev .pages.dev
        .backblazeb2.com .wasabisys.com .supabase.co .appspot.com .run.app .cloudfunctions.net .vercel.app
        .netlify.app .herokuapp.com .fly.dev .onrender.com .github.io .gitlab.io .glitch.me .repl.co .replit.app
        .replit.dev .surge.sh .web.app .firebaseapp.com .deno.dev .railway.app .b-cdn.net .algolia.net .algolianet.com
        .upstash.io .mongodb.net data.mongodb-api.com .neon.tech api.cloudinary.com res.cloudinary.com
        .storage.googleapis.com .cloudapp.azure.com .cloudapp.net .trafficmanager.net .core.windows.net .on.aws
        .aliyuncs.com .myqcloud.com .linodeobjects.com .vultrobjects.com .scw.cloud .ondigitalocean.app
        .koyeb.app .zeabur.app .hf.space
    """,
    "sites and workspaces": """
        .wordpress.com .weebly.com .wixsite.com .squarespace.com .tumblr.com .blogspot.com .webflow.io .framer.website
        .myshopify.com .atlassian.net .zendesk.com .freshdesk.com .service-now.com .force.com .salesforce.com
        .my.site.com .okta.com .auth0.com .readthedocs.io .gitbook.io .substack.com .ghost.io .carrd.co .strikingly.com
    """,
    "names for any address": """
        .nip.io .sslip.io .xip.io .traefik.me .localtest.me .lvh.me .vcap.me .duckdns.org .ddns.net .no-ip.org
        .hopto.org .dyndns.org .dynu.net .freeddns.org .zapto.org .rbndr.us .1u.ms
    """,
    "telemetry and analytics": """
        www.google-analytics.com analytics.google.com .google-analytics.com .ingest.sentry.io .sentry.io sentry.io
        api.segment.io api.mixpanel.com api.amplitude.com api2.amplitude.com app.posthog.com us.i.posthog.com
        eu.i.posthog.com http-intake.logs.datadoghq.com api.datadoghq.com .datadoghq.com log-api.newrelic.com
        in.logs.betterstack.com .logtail.com api.honeycomb.io api.axiom.co collector.newrelic.com
    """,
    "search, fetch and translation": """
        r.jina.ai s.jina.ai api.tavily.com api.exa.ai serpapi.com api.search.brave.com api.firecrawl.dev
        api.scrapingbee.com translate.google.com translate.goog .translate.goog web.archive.org archive.org archive.ph
        corsproxy.io api.allorigins.win api.codetabs.com images.weserv.nl proxy.duckduckgo.com www.google.com
        www.bing.com duckduckgo.com api.bing.microsoft.com
    """,
    "DNS over HTTPS": """
        dns.google cloudflare-dns.com one.one.one.one mozilla.cloudflare-dns.com dns.quad9.net doh.opendns.com
        dns.nextdns.io dns.adguard.com dns.adguard-dns.com doh.cleanbrowsing.org doh.dns.sb doh.pub dns.alidns.com
        chrome.cloudflare-dns.com security.cloudflare-dns.com family.cloudflare-dns.com
    """,
    "model vendors": """
        api.anthropic.com api.openai.com generativelanguage.googleapis.com api.mistral.ai api.cohere.com api.cohere.ai
        api.groq.com api.together.xyz api.together.ai api.deepseek.com api.x.ai openrouter.ai api.perplexity.ai
        api.fireworks.ai api.replicate.com api-inference.huggingface.co router.huggingface.co .openai.azure.com
        .aiplatform.googleapis.com aiplatform.googleapis.com dashscope.aliyuncs.com api.moonshot.cn api.elevenlabs.io
        api.stability.ai api.voyageai.com api.cerebras.ai integrate.api.nvidia.com .services.ai.azure.com
        .cognitiveservices.azure.com api.assemblyai.com api.deepgram.com
    """,
}  # fmt: skip


def _sorted() -> tuple[dict[str, str], dict[str, str]]:
    exact: dict[str, str] = {}
    under: dict[str, str] = {}
    for kind, words in TENANTS.items():
        for word in words.split():
            if word.startswith("."):
                under[word[1:]] = kind
            else:
                exact[word] = kind
    return exact, under


_EXACT, _UNDER = _sorted()
_SUFFIX_PARENTS: Final = {name.partition(".")[2]: kind for name, kind in _UNDER.items()}
# What is made for a moment by whoever wants to receive something, or shares one name among all who use it.
_THROWAWAY: Final = frozenset(
    {
        "paste and file drops",
        "webhook and request catchers",
        "automation hooks",
        "office documents and forms",
        "chat and mail",
        "names for any address",
    }
)
_CLOUD: Final = ".amazonaws.com"
_SERVICE: Final = re.compile(
    r"(?:s3|sqs|sns|dynamodb|kinesis|firehose|lambda|logs|email|ses|sts|events|states|ssm|secretsmanager|queue)[.-]"
)


def tenants_of(host: str) -> str | None:
    """Return what strangers have on `host` itself ("office documents and forms", ...), or None.

    A name below a suffix of customers is one customer's and no stranger's, unless anybody takes such a name for an
    hour, or it is one of a provider's own services, where a caller's key and not the name says whose place it is.
    """
    found = _EXACT.get(host)
    if found is not None:
        return found
    found = tenant_suffix(host.partition(".")[2])
    if found in _THROWAWAY or (found is not None and host.endswith(_CLOUD) and _SERVICE.match(host)):
        return found
    return None


def tenant_suffix(parent: str) -> str | None:
    """Return what strangers have under `parent`, when names below it are theirs, or None."""
    name = parent
    while name:
        if name in _UNDER:
            return _UNDER[name]
        name = name.partition(".")[2]
    return None


def tenant_suffix_under(parent: str) -> str | None:
    """Return what strangers have, when a name that `*.parent` matches is a suffix of theirs, or None."""
    return _SUFFIX_PARENTS.get(parent)


def tenants_under(parent: str) -> tuple[str, str] | None:
    """Return a host that `*.parent` matches and that strangers have a place on, with its kind; or None."""
    return next(((name, kind) for name, kind in _EXACT.items() if name.partition(".")[2] == parent), None)
