"""Hosts from which packages, images and models are installed.

Rule 1: these are data: a host stands here because a client's default configuration, or a widely used mirror, names it.
Rule 2: an entry of the list, or a wildcard that takes one in, is an error outside the `build` profile (E1): what runs
        at run time was resolved, pinned and built before (X11), and a registry both brings code in and takes uploads.
Rule 3: a leading dot stands for everything below; else the host is exact.
Sources: the default configuration of each client (pip, uv, npm, yarn, cargo, go, gem, maven, gradle, nuget, composer,
apt, apk, dnf, docker, huggingface_hub, ...).
"""

from __future__ import annotations

from typing import Final

from lockgate.policy.suffixes import below

REGISTRIES: Final[dict[str, str]] = {
    "Python": """
        pypi.org .pypi.org pypi.python.org files.pythonhosted.org .pythonhosted.org pypi.io download.pytorch.org
        bootstrap.pypa.io repo.anaconda.com conda.anaconda.org .anaconda.org anaconda.org repo.continuum.io prefix.dev
        repo.prefix.dev conda-mapping.prefix.dev wheels.scipy.org pypi.nvidia.com pypi.ngc.nvidia.com
        pypi.tuna.tsinghua.edu.cn pypi.doubanio.com pypi.douban.com pypi.mirrors.ustc.edu.cn mirror.baidu.com
        pypi.hustunique.com pypi.sdutlinux.org www.piwheels.org piwheels.org packages.piwheels.org gemfury.com
        .fury.io pypi.fury.io astral.sh releases.astral.sh install.python-poetry.org www.python.org
    """,
    "JavaScript": """
        registry.npmjs.org registry.npmjs.com .npmjs.org .npmjs.com npmjs.org npmjs.com registry.yarnpkg.com
        .yarnpkg.com yarnpkg.com registry.npmmirror.com .npmmirror.com registry.npm.taobao.org npm.taobao.org
        npm.jsr.io jsr.io .jsr.io npm.pkg.github.com unpkg.com cdn.jsdelivr.net .jsdelivr.net esm.sh .esm.sh
        cdn.skypack.dev jspm.dev .jspm.dev jspm.io .jspm.io deno.land .deno.land cdnjs.cloudflare.com nodejs.org
        .nodejs.org bun.sh get.pnpm.io esm.run skimdb.npmjs.com replicate.npmjs.com
    """,
    "Rust": """
        crates.io .crates.io index.crates.io static.crates.io static.rust-lang.org .rust-lang.org sh.rustup.rs
        rsproxy.cn rsproxy-sparse.cn crates-io.proxy.ustclug.org
    """,
    "Go": """
        proxy.golang.org sum.golang.org index.golang.org .golang.org golang.org goproxy.io .goproxy.io goproxy.cn
        gosum.io go.dev dl.google.com pkg.go.dev athens.azurefd.net gopkg.in
    """,
    "Ruby": "rubygems.org .rubygems.org gems.ruby-china.com rubygems.pkg.github.com rubygems.global.ssl.fastly.net",
    "Java": """
        repo.maven.apache.org repo1.maven.org repo2.maven.org .maven.org maven.org central.sonatype.com .sonatype.org
        oss.sonatype.org s01.oss.sonatype.org central.sonatype.org maven.google.com dl.bintray.com jcenter.bintray.com
        plugins.gradle.org services.gradle.org downloads.gradle.org repo.gradle.org .gradle.org jitpack.io
        www.jitpack.io repo.spring.io maven.pkg.github.com maven.aliyun.com repo.huaweicloud.com repo.clojars.org
        clojars.org packages.confluent.io repository.apache.org dlcdn.apache.org archive.apache.org
        maven-central.storage.googleapis.com maven-central.storage-download.googleapis.com get.sdkman.io api.sdkman.io
    """,
    ".NET": """
        api.nuget.org www.nuget.org nuget.org .nuget.org globalcdn.nuget.org nuget.pkg.github.com pkgs.dev.azure.com
        .pkgs.visualstudio.com www.powershellgallery.com powershellgallery.com community.chocolatey.org
        packages.chocolatey.org chocolatey.org
    """,
    "PHP": """
        packagist.org .packagist.org repo.packagist.org getcomposer.org pecl.php.net pear.php.net
        mirrors.cloud.tencent.com
    """,
    "other languages": """
        hackage.haskell.org hackage.fpcomplete.com www.stackage.org hex.pm .hex.pm repo.hex.pm builds.hex.pm
        cpan.metacpan.org www.cpan.org .cpan.org fastapi.metacpan.org cran.r-project.org .r-project.org
        cloud.r-project.org cran.rstudio.com packagemanager.posit.co packagemanager.rstudio.com bioconductor.org
        pkg.julialang.org .julialang.org pub.dev .pub.dev pub.dartlang.org storage.flutter-io.cn cocoapods.org
        .cocoapods.org cdn.cocoapods.org trunk.cocoapods.org swiftpackageregistry.com opam.ocaml.org luarocks.org
        .luarocks.org elpa.gnu.org melpa.org .melpa.org code.dlang.org package.elm-lang.org nimble.directory conan.io
        center.conan.io center2.conan.io registry.bazel.build bcr.bazel.build raku.land registry.terraform.io
        .terraform.io registry.opentofu.org releases.hashicorp.com galaxy.ansible.com supermarket.chef.io
        forgeapi.puppet.com artifacthub.io charts.helm.sh charts.bitnami.com registry.bower.io bower.herokuapp.com
        jfrog.io .jfrog.io packagecloud.io .packagecloud.io cloudsmith.io .cloudsmith.io .cloudsmith.com
    """,
    "operating systems": """
        deb.debian.org .debian.org debian.org security.debian.org ftp.debian.org httpredir.debian.org
        snapshot.debian.org archive.ubuntu.com .archive.ubuntu.com security.ubuntu.com ports.ubuntu.com
        old-releases.ubuntu.com releases.ubuntu.com cdimage.ubuntu.com ppa.launchpad.net ppa.launchpadcontent.net
        .launchpad.net .launchpadcontent.net esm.ubuntu.com api.snapcraft.io .snapcraft.io dl-cdn.alpinelinux.org
        .alpinelinux.org mirrors.fedoraproject.org .fedoraproject.org mirror.centos.org .centos.org
        mirrors.rockylinux.org .rockylinux.org mirrors.almalinux.org .almalinux.org repo.almalinux.org cdn.redhat.com
        cdn-ubi.redhat.com download.opensuse.org .opensuse.org mirrorcache.opensuse.org geo.mirror.pkgbuild.com
        .pkgbuild.com .archlinux.org archlinux.org mirror.rackspace.com mirrors.kernel.org cdn.kernel.org
        mirrors.edge.kernel.org mirrors.aliyun.com .mirrors.aliyun.com mirrors.tuna.tsinghua.edu.cn
        mirrors.ustc.edu.cn mirrors.163.com mirrors.huaweicloud.com mirrors.tencent.com mirror.nju.edu.cn
        mirrors.sjtug.sjtu.edu.cn mirrors.bfsu.edu.cn mirrors.zju.edu.cn mirror.sjtu.edu.cn ftp.jaist.ac.jp
        mirror.math.princeton.edu mirror.leaseweb.com ftp.fau.de mirrors.ocf.berkeley.edu mirror.kumi.systems
        packages.microsoft.com packages.cloud.google.com apt.postgresql.org download.docker.com pkgs.k8s.io
        apt.llvm.org deb.nodesource.com rpm.nodesource.com repo.mysql.com dl.fedoraproject.org voidlinux.org
        repo-default.voidlinux.org cache.nixos.org .nixos.org channels.nixos.org cachix.org .cachix.org
        packages.wolfi.dev apk.cgr.dev distfiles.gentoo.org .gentoo.org pkg.freebsd.org .freebsd.org cdn.openbsd.org
        packages.gitlab.com artifacts.elastic.co packages.elastic.co repo.mongodb.org packages.grafana.com
        apt.grafana.com rpm.grafana.com packages.redis.io repos.influxdata.com downloads.mariadb.com cli.github.com
        .releases.hashicorp.com developer.download.nvidia.com nvidia.github.io apt.repos.intel.com repo.radeon.com
        ftp.netbsd.org cdn.netbsd.org flathub.org dl.flathub.org formulae.brew.sh brew.sh packages.termux.dev
    """,
    "container images": """
        registry-1.docker.io auth.docker.io index.docker.io hub.docker.com .docker.io docker.io desktop.docker.com
        production.cloudflare.docker.com ghcr.io .ghcr.io quay.io .quay.io gcr.io .gcr.io registry.k8s.io k8s.gcr.io
        .pkg.dev mcr.microsoft.com .mcr.microsoft.com .azurecr.io public.ecr.aws .ecr.aws nvcr.io registry.gitlab.com
        registry.access.redhat.com registry.redhat.io registry.fedoraproject.org cgr.dev registry.suse.com
        container-registry.oracle.com docker.elastic.co icr.io .icr.io docker.pkg.github.com
        registry.cn-hangzhou.aliyuncs.com docker.m.daocloud.io lscr.io docker.mirrors.ustc.edu.cn
    """,
    "models and data sets": """
        huggingface.co .huggingface.co hf.co .hf.co hf-mirror.com .hf-mirror.com cdn-lfs.huggingface.co
        registry.ollama.ai ollama.com .ollama.ai modelscope.cn .modelscope.cn www.modelscope.cn kaggle.com
        www.kaggle.com .kaggle.com tfhub.dev storage.kaggle.com civitai.com api.ngc.nvidia.com
        models.inference.ai.azure.com nltk.org www.nltk.org spacy.io
    """,
}  # fmt: skip


def _sorted() -> tuple[dict[str, str], dict[str, str]]:
    exact: dict[str, str] = {}
    under: dict[str, str] = {}
    for kind, words in REGISTRIES.items():
        for word in words.split():
            if word.startswith("."):
                under[word[1:]] = kind
            else:
                exact[word] = kind
    return exact, under


_EXACT, _UNDER = _sorted()


def registry(host: str) -> str | None:
    """Return what is installed from `host` ("Python", "container images", ...), or None when it is no registry."""
    if host in _EXACT:
        return _EXACT[host]
    parent = host
    while parent:
        if parent in _UNDER and parent != host:
            return _UNDER[parent]
        parent = parent.partition(".")[2]
    return None


def registry_under(parent: str) -> str | None:
    """Return what is installed from one of the hosts that `*.parent` matches, or None."""
    for name, kind in (*_EXACT.items(), *_UNDER.items()):
        if name.partition(".")[2] == parent or (name in _UNDER and below(parent, name)):
            return kind
    return None
