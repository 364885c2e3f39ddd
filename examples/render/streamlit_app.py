"""Streamlit: st.markdown with unsafe_allow_html left off; run with `streamlit run streamlit_app.py`."""

from __future__ import annotations

import streamlit as st
from guarding import audited, guard_for, model

if message := st.chat_input("Ask"):
    with st.chat_message("assistant"):
        st.markdown(audited(guard_for(message).markdown(model(message))).text)
